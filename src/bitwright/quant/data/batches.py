"""Calibration data: from whatever the user has (`quant.data.sources`) to batches, dicts by input name.

`transform` is applied to each item first. Arrays and tuples go to the inputs in order; items of a
tuple behind the last input, and keys of a dict that are no inputs, are left out: that is where
loaders put labels. A model that fixes its batch size gets batches of that size (`quant.data.splitting`).
Batches are checked against the model before anything runs.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from bitwright.errors import BitwrightError, CalibrationError
from bitwright.ir.arrays import as_array
from bitwright.ir.feeds import bind_inputs, check_inputs
from bitwright.ir.graph import Graph
from bitwright.ir.types import TensorType
from bitwright.quant.data.sources import File, source_of
from bitwright.quant.data.splitting import Splitter
from bitwright.warn import DataWarning

Array = np.ndarray[Any, Any]
Batch = dict[str, Array]
Transform = Callable[[Any], Any]


class Batches:
    """Batches of a data source for one graph; iterating starts over where the source can.

    `subset` batches are given at most. `batch_size` is for samples that come in one array, table or
    folder of images, where the model does not fix it.
    """

    def __init__(
        self,
        data: Any,
        graph: Graph,
        *,
        transform: Transform | None = None,
        subset: int | None = None,
        batch_size: int | None = None,
    ) -> None:
        if subset is not None and subset < 1:
            raise CalibrationError("the subset must have at least one batch", found=subset)
        if batch_size is not None and batch_size < 1:
            raise CalibrationError("a batch must have at least one sample", found=batch_size)
        self._source = source_of(data, graph, batch_size)
        self._transform, self._subset = transform, subset
        self._inputs = graph.inputs
        self._graph = graph
        self._splitter = Splitter(graph.inputs)
        self._ignored: dict[str, None] = {}

    @property
    def is_repeatable(self) -> bool:
        """Whether the source can be read more than once."""
        return not isinstance(self._source, Iterator)

    def __len__(self) -> int:
        """The number of batches; TypeError where the source does not tell it."""
        size = len(self._source) * self._parts  # type: ignore[arg-type]
        return size if self._subset is None else min(size, self._subset)

    @cached_property
    def _parts(self) -> int:
        """Batches that an item of the source holds, as the first one tells."""
        if not self._splitter.is_needed:
            return 1
        if not isinstance(self._source, Sequence):
            raise TypeError("the source does not tell how many batches an item holds")
        if not self._source:
            return 1
        item = self._read(self._source[0])
        return len(Splitter(self._inputs).split(self._named(item, "batch 0 of the data")))

    @property
    def known_length(self) -> int | None:
        try:
            return len(self)
        except TypeError:
            return self._subset

    def __iter__(self) -> Iterator[Batch]:
        return itertools.islice(self._all(), self._subset)

    def _all(self) -> Iterator[Batch]:
        self._splitter = Splitter(self._inputs)
        count, is_empty = 0, True
        for item in self._chosen():
            where = f"batch {count} of the data"
            for part in self._splitter.split(self._named(self._read(item), where)):
                batch = self._checked(part, f"batch {count} of the data")
                is_empty = is_empty and not has_samples(batch)
                yield batch
                count += 1
        if not count:
            raise CalibrationError(
                "the data is empty",
                expected="at least one batch",
                hint="" if self.is_repeatable else "An iterator can be read once only.",
            )
        if is_empty:
            raise no_samples(count)

    def _chosen(self) -> Iterable[Any]:
        """All items, or `subset` of them: spread evenly where there is a length, else the first."""
        if self._subset is None:
            return self._source
        try:
            size = len(self._source)  # type: ignore[arg-type]
        except TypeError:
            return itertools.islice(self._source, self._subset)
        if size <= self._subset:
            return self._source
        wanted = {i * size // self._subset for i in range(self._subset)}
        if hasattr(self._source, "__getitem__") and not isinstance(self._source, Mapping):
            return (self._source[i] for i in sorted(wanted))
        return (item for i, item in enumerate(self._source) if i in wanted)

    def _read(self, item: Any) -> Any:
        if isinstance(item, File):
            item = item.read()
        return item if self._transform is None else self._transform(item)

    def _checked(self, batch: Batch, where: str) -> Batch:
        try:
            check_inputs(self._graph, batch)
            names = [value.name for value in self._inputs]
            bound = bind_inputs(self._inputs, [batch[name] for name in names], {})
            batch.update(zip(names, bound, strict=True))
        except BitwrightError as error:
            hint = self._batch_axis_hint(batch)
            raise CalibrationError(str(error), where=where, hint=hint) from None
        return batch

    def _named(self, item: Any, where: str) -> Batch:
        names = [value.name for value in self._inputs]
        if isinstance(item, Mapping):
            others = [str(name) for name in item if str(name) not in names]
            self._ignored.update(dict.fromkeys(others))
            given = {str(name): value for name, value in item.items()}
            return {name: as_array(given[name]) for name in names if name in given}
        items = list(item) if isinstance(item, (tuple, list)) else [item]
        if len(items) < len(names) or item is None:
            raise CalibrationError(
                "the batch has too few arrays",
                where=where,
                expected=f"{len(names)} ({', '.join(names)}), or a dict of them by name",
                found="None" if item is None else len(items),
            )
        return {name: as_array(value) for name, value in zip(names, items, strict=False)}

    def _batch_axis_hint(self, batch: Batch) -> str:
        for value in self._inputs:
            array = batch.get(value.name)
            if array is None or not isinstance(value.type, TensorType):
                continue
            if array.ndim == value.rank - 1:
                return f"Does {value.name!r} lack its batch axis? Give array[None]."
        return ""

    def notes(self) -> list[str]:
        """What was left out of the batches that were given so far."""
        found = list(getattr(self._source, "notes", ()))
        if self._ignored:
            names = ", ".join(map(repr, self._ignored))
            found.append(f"the data holds {names}, which the model does not take: left out")
        if self._splitter.left_over:
            found.append(
                f"{self._splitter.left_over} samples are no whole batch of the size that the model "
                "fixes: left out"
            )
        return found

    def warn(self) -> None:
        """Give the notes as warnings, for those who have no report for them."""
        for note in self.notes():
            warnings.warn(note, DataWarning, stacklevel=3)


def has_samples(batch: Batch) -> bool:
    """Whether any input that is no single number has elements."""
    arrays = [array for array in batch.values() if array.ndim]
    return not arrays or any(array.size for array in arrays)


def no_samples(count: int) -> CalibrationError:
    """The error for batches that hold nothing."""
    return CalibrationError(
        "the data has no samples",
        expected="a batch whose inputs have elements",
        found=f"{count} batch{'es' * (count != 1)} of none",
        hint="Look at the shapes of the arrays: is the batch axis 0?",
    )
