"""Training data: batches by input name, in an order that a seed determines.

    a dict of arrays            samples along axis 0, split into batches and shuffled
    a list of batches           dicts, or tuples (inputs in order, then labels)
    a PyTorch loader            its own order; its generators are seeded at each epoch
    a function of the epoch     data(epoch) gives the batches of that epoch
    any other iterable          as a list; an iterator lasts one epoch
    a path                      what `bw.calibrate` reads; samples of one file are shuffled

The position in the data is an epoch and a number of batches in it, so that a run can be resumed.
Loaders, functions and iterables draw from global random generators that are seeded for each epoch
(`random_state`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bitwright.errors import BitwrightError, TrainingError
from bitwright.ir.arrays import Array, as_array, read_arrays
from bitwright.ir.feeds import bind_inputs
from bitwright.ir.graph import Graph, Value
from bitwright.ir.types import TensorType
from bitwright.quant.data.sources import ARRAYS, File, source_of
from bitwright.quant.data.sources import Source as Readable
from bitwright.quant.data.splitting import BATCH_SIZE
from bitwright.train.losses import TEACHER
from bitwright.train.optimizers import PREFIX
from bitwright.train.random_state import isolated

Batch = dict[str, Array]
Source = Callable[[int, int], Iterable[Any]]
"""The items of an epoch after a number of them: `source(epoch, skip)`."""


@dataclass(frozen=True)
class Position:
    """The next batch: `index` batches of this epoch have been used."""

    epoch: int = 0
    index: int = 0


class Batches:
    """Batches of a data source for the inputs of a step."""

    def __init__(
        self,
        data: Any,
        graph: Graph,
        labels: Sequence[str] = (),
        batch_size: int | None = None,
        shuffle: bool | None = None,
        seed: int = 0,
    ) -> None:
        """`graph` has the inputs of the model and those of labels, whose names are `labels`."""
        self.inputs = [v for v in graph.inputs if not v.name.startswith(PREFIX)]
        self.labels, self.seed = tuple(labels), seed
        self.teacher = any(v.name.startswith(TEACHER) for v in graph.inputs)
        given = [v for v in self.inputs if v.name not in self.labels]
        # tuples hold the model's inputs, then labels
        self.order = [*given, *(v for v in self.inputs if v.name in self.labels)]
        if batch_size is not None and batch_size < 1:
            raise TrainingError("batch_size is at least 1", found=batch_size)
        fixed = _fixed_size(self.inputs)
        if fixed is not None and batch_size not in (None, fixed):
            raise TrainingError(
                "the model has a fixed batch size", expected=fixed, found=f"batch_size={batch_size}"
            )
        self.size = fixed or batch_size or BATCH_SIZE
        self.drops_last = fixed is not None
        self.is_read_once = isinstance(data, Iterator)
        self.epochs_of = self._source(data, graph, shuffle)

    def epoch(self, number: int, skip: int = 0) -> Iterator[Batch]:
        """The batches of an epoch after the first `skip`."""
        for index, item in enumerate(self.epochs_of(number, skip), skip):
            yield self._checked(item, f"batch {index} of epoch {number}")

    def stream(self, start: Position, epochs: int | None) -> Iterator[tuple[Batch, Position]]:
        """Batches from a position on, each with the position behind it."""
        epoch, index = start.epoch, start.index
        while epochs is None or epoch < epochs:
            count = index
            for batch in self.epoch(epoch, index):
                count += 1
                yield batch, Position(epoch, count)
            if count == 0:
                raise TrainingError(
                    "the data is empty",
                    expected="at least one batch",
                    hint="An iterator can be read only once." if self.is_read_once else "",
                )
            epoch, index = epoch + 1, 0

    # sources

    def _source(self, data: Any, graph: Graph, shuffle: bool | None) -> Source:
        if isinstance(data, (str, Path, Readable)):
            data = self._read(data, graph)
        if isinstance(data, Mapping):
            return self._of_arrays(data, shuffle is not False)
        if isinstance(data, Sequence):
            return self._of_list(data, bool(shuffle))
        if callable(data) and not hasattr(data, "__iter__"):
            return lambda epoch, skip: isolated(lambda: data(epoch), skip, self._epoch_seed(epoch))
        if not isinstance(data, Iterable):
            raise TrainingError(
                "this is not training data",
                expected="a dict of arrays, a list of batches, a loader, a function or a path",
                found=type(data).__name__,
            )
        self.length = len(data) if isinstance(data, Sized) else None
        return lambda epoch, skip: self._of_loader(data, epoch, skip)

    length: int | None = None
    """The batches of an epoch, if they are known."""

    def _read(self, data: Any, graph: Graph) -> Any:
        """Arrays of one file or table, or batches in several files, which are read on access."""
        path = None if isinstance(data, Readable) else Path(data)
        if path is not None and path.is_file() and path.suffix in ARRAYS:
            found = read_arrays(path, TrainingError)
            if isinstance(found, Mapping):
                return dict(found)
            if len(self.inputs) == 1:
                return {self.inputs[0].name: found}
        wanted = [value.node for value in self.inputs]
        only = graph.with_(nodes=tuple(wanted), outputs=(), updates=())
        items = source_of(data, only, self.size)
        if isinstance(items, Sequence):
            return items
        tables = list(items)
        if not tables:
            return tables
        return {name: np.concatenate([one[name] for one in tables]) for name in tables[0]}

    def _of_arrays(self, data: Mapping[str, Any], shuffles: bool) -> Source:
        names = {value.name for value in self.inputs}
        arrays = {str(n): as_array(array) for n, array in data.items() if str(n) in names}
        if not arrays:
            raise TrainingError(
                "the data has none of the inputs",
                expected=", ".join(repr(v.name) for v in self.order),
                found=", ".join(map(repr, data)) or "no array",
            )
        lengths = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
        if len(set(lengths.values())) != 1:
            raise TrainingError(
                "the arrays have different numbers of samples",
                found=", ".join(f"{name}: {count}" for name, count in lengths.items()),
            )
        count, size = next(iter(lengths.values())), self.size
        self.length = count // size if self.drops_last else -(-count // size)
        if count and not self.length:
            raise TrainingError(
                "there are fewer samples than the model's fixed batch", expected=size, found=count
            )

        def batches(epoch: int, skip: int) -> Iterator[Batch]:
            order = self._permutation(epoch, count) if shuffles else np.arange(count)
            for number in range(skip, self.length or 0):
                chosen = order[number * size : (number + 1) * size]
                yield {name: array[chosen] for name, array in arrays.items()}

        return batches

    def _of_list(self, data: Sequence[Any], shuffles: bool) -> Source:
        self.length = len(data)

        def batches(epoch: int, skip: int) -> Iterator[Any]:
            order = self._permutation(epoch, len(data)) if shuffles else range(len(data))
            return (data[number] for number in list(order)[skip:])

        return batches

    def _of_loader(self, data: Iterable[Any], epoch: int, skip: int) -> Iterator[Any]:
        """The items of a loader; its own generators and those of its samplers are seeded."""
        parts: list[Any] = [data]
        for name in ("sampler", "batch_sampler"):
            part = getattr(data, name, None)
            parts += [part, getattr(part, "sampler", None)]
        for part in parts:
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
            generator: Any = getattr(part, "generator", None)
            if hasattr(generator, "manual_seed"):
                generator.manual_seed(self._epoch_seed(epoch))
        return isolated(lambda: data, skip, self._epoch_seed(epoch))

    def _epoch_seed(self, epoch: int) -> int:
        return (self.seed * 1_000_003 + epoch) % 2**63

    def _permutation(self, epoch: int, count: int) -> Array:
        return np.random.default_rng((self.seed % 2**63, epoch)).permutation(count)

    # checks

    def _checked(self, item: Any, where: str) -> Batch:
        batch = self._named(item.read() if isinstance(item, File) else item, where)
        missing = [v.name for v in self.inputs if v.name not in batch]
        if missing:
            is_label = missing[0] in self.labels
            raise TrainingError(
                f"the batch has no labels: {missing[0]!r} is missing"
                if is_label
                else f"the batch has no input {missing[0]!r}",
                where=where,
                expected=", ".join(repr(v.name) for v in self.order),
                found=", ".join(map(repr, batch)) or "none",
                hint="A teacher (teacher=, --teacher) needs no labels." if is_label else "",
            )
        try:
            bind_inputs(self.inputs, [batch[v.name] for v in self.inputs], {})
        except BitwrightError as error:
            raise TrainingError(str(error), where=where) from None
        return batch

    def _named(self, item: Any, where: str) -> Batch:
        if isinstance(item, Mapping):
            given = {str(name): value for name, value in item.items()}
        else:
            items = list(item) if isinstance(item, (tuple, list)) else [item]
            if len(items) > len(self.order) and not self.teacher:
                raise TrainingError(
                    "the batch has too many arrays",
                    where=where,
                    expected=f"{len(self.order)} ({', '.join(v.name for v in self.order)})",
                    found=len(items),
                )
            given = {v.name: one for v, one in zip(self.order, items, strict=False)}
        return {v.name: self._array(v, given[v.name]) for v in self.inputs if v.name in given}

    def _array(self, value: Value, given: Any) -> Array:
        """The array; labels of another type of numbers are converted."""
        array = as_array(given)
        element = value.dtype.numpy if isinstance(value.type, TensorType) else array.dtype
        if value.name in self.labels and array.dtype != element and array.dtype.kind in "iufb":
            is_exact = array.dtype.kind != "f" or np.dtype(element).kind not in "iu"
            array = array.astype(element) if is_exact else array
        return array


def _fixed_size(inputs: Sequence[Value]) -> int | None:
    """The batch size that the model fixes, or None."""
    sizes = [v.shape[0] for v in inputs if isinstance(v.type, TensorType) and v.rank]
    return sizes[0] if sizes and isinstance(sizes[0], int) else None


def sample_count(batch: Mapping[str, Array]) -> int:
    """The length of the first axis; 1 if no array has one."""
    sizes = [array.shape[0] for array in batch.values() if array.ndim]
    return int(sizes[0]) if sizes else 1
