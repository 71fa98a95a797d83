"""Batches of a data source (`sources`): dicts of arrays by input name, checked against the model.

`transform` is applied to each item first. Arrays and tuples map to the inputs in order. Further
items of a tuple, and keys of a dict that are not inputs, are ignored, because loaders put labels
there. A model with a fixed batch size gets batches of that size (`splitting`).
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from bitwright.errors import BitwrightError, CalibrationError
from bitwright.ir.arrays import Array, as_array
from bitwright.ir.feeds import bind_inputs, check_inputs
from bitwright.ir.graph import Graph
from bitwright.ir.types import TensorType
from bitwright.quant.data.sources import File, source_of
from bitwright.quant.data.splitting import Splitter
from bitwright.warn import DataWarning

Batch = dict[str, Array]
Transform = Callable[[Any], Any]


class Batches:
    """Batches of a data source for one graph; iterates repeatedly if the source can.

    `subset` limits the number of batches. `batch_size` is for samples in one array, table or folder
    of images, if the model does not fix it.
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
        """The number of batches; raises TypeError if it is unknown."""
        size = len(self._source) * self._parts  # type: ignore[arg-type]
        return size if self._subset is None else min(size, self._subset)

    @cached_property
    def _parts(self) -> int:
        """Batches per item of the source, determined from the first item."""
        if not self._splitter.is_needed:
            return 1
        if not isinstance(self._source, Sequence):
            raise TypeError("the number of batches per item is unknown")
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
                hint="" if self.is_repeatable else "An iterator can be read only once.",
            )
        if is_empty:
            raise no_samples(count)

    def _chosen(self) -> Iterable[Any]:
        """All items, or `subset` of them: spread evenly if the length is known, else the first."""
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
                return f"Is the batch axis of {value.name!r} missing? Pass array[None]."
        return ""

    def notes(self) -> list[str]:
        """Notes on data that was ignored so far."""
        found = list(getattr(self._source, "notes", ()))
        if self._ignored:
            names = ", ".join(map(repr, self._ignored))
            found.append(f"the data holds {names}, which are not inputs of the model: ignored")
        if self._splitter.left_over:
            found.append(
                f"{self._splitter.left_over} samples do not fill a batch of the model's fixed "
                "size: ignored"
            )
        return found

    def warn(self) -> None:
        """Issue the notes as warnings, for callers without a report."""
        for note in self.notes():
            warnings.warn(note, DataWarning, stacklevel=3)


def has_samples(batch: Batch) -> bool:
    """Whether any non-scalar input has elements."""
    arrays = [array for array in batch.values() if array.ndim]
    return not arrays or any(array.size for array in arrays)


def no_samples(count: int) -> CalibrationError:
    """The error for batches without samples."""
    return CalibrationError(
        "the data has no samples",
        expected="a batch whose inputs have elements",
        found=f"{count} empty batch{'es' * (count != 1)}",
        hint="Check the shapes of the arrays: is the batch axis 0?",
    )
