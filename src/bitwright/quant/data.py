"""Calibration data: from whatever the user has to batches, dicts of arrays by input name.

    an iterable of dicts, arrays or tuples          arrays and tuples go to the inputs in order
    a reader with `get_next()`                      as ONNX Runtime's quantizer takes it
    a PyTorch DataLoader                            tensors anywhere become arrays
    a folder of .npz (by input name) or .npy        in order of the file names, one batch a file

`transform` is applied to each item first. Items of a tuple behind the last input are left out: that
is where loaders put labels. Batches are checked against the model before anything runs.
"""

from __future__ import annotations

import itertools
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from bitwright.errors import BitwrightError, CalibrationError
from bitwright.ir.feeds import bind_input, check_inputs
from bitwright.ir.graph import Graph
from bitwright.ir.types import TensorType

Array = np.ndarray[Any, Any]
Batch = dict[str, Array]
Transform = Callable[[Any], Any]
SUFFIXES = (".npz", ".npy")


class Batches:
    """Batches of a data source for one graph; iterating starts over where the source can."""

    def __init__(
        self,
        data: Any,
        graph: Graph,
        *,
        transform: Transform | None = None,
        subset: int | None = None,
    ) -> None:
        if subset is not None and subset < 1:
            raise CalibrationError("the subset must have at least one batch", found=subset)
        self._source, self._transform, self._subset = _source(data, graph), transform, subset
        self._inputs = graph.inputs
        self._graph = graph

    @property
    def is_repeatable(self) -> bool:
        """Whether the source can be read more than once."""
        return not isinstance(self._source, Iterator)

    def __len__(self) -> int:
        """The number of batches; TypeError where the source does not tell it."""
        size = len(self._source)  # type: ignore[arg-type]
        return size if self._subset is None else min(size, self._subset)

    @property
    def known_length(self) -> int | None:
        try:
            return len(self)
        except TypeError:
            return self._subset

    def __iter__(self) -> Iterator[Batch]:
        count, is_empty = 0, True
        for count, item in enumerate(self._chosen(), 1):
            batch = self._batch(item, f"batch {count - 1} of the data")
            is_empty = is_empty and not has_samples(batch)
            yield batch
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

    def _batch(self, item: Any, where: str) -> Batch:
        if isinstance(item, _File):
            item = item.read()
        if self._transform is not None:
            item = self._transform(item)
        batch = self._named(item, where)
        try:
            check_inputs(self._graph, batch)
            bindings: dict[str, int] = {}
            for _ in range(2):  # a second look checks sizes that a later input fixed
                for value in self._inputs:
                    batch[value.name] = bind_input(value, batch[value.name], bindings)
        except BitwrightError as error:
            hint = self._batch_axis_hint(batch)
            raise CalibrationError(str(error), where=where, hint=hint) from None
        return batch

    def _named(self, item: Any, where: str) -> Batch:
        if isinstance(item, Mapping):
            return {str(name): as_array(value) for name, value in item.items()}
        names = [value.name for value in self._inputs]
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


def as_array(item: Any) -> Array:
    """An array of anything array-like, PyTorch tensors (on any device) included."""
    if hasattr(item, "detach"):
        item = item.detach().cpu()
        if str(item.dtype) == "torch.bfloat16":  # numpy has no such type; ml_dtypes does
            return np.asarray(item.float().numpy().astype(ml_dtypes.bfloat16))
        item = item.numpy()
    return np.asarray(item)


def _source(data: Any, graph: Graph) -> Iterable[Any]:
    if isinstance(data, (str, Path)):
        return _files(Path(data), graph)
    if hasattr(data, "get_next"):
        return iter(data.get_next, None)
    if isinstance(data, Mapping):
        return [data]
    if isinstance(data, np.ndarray) or hasattr(data, "detach"):
        array = as_array(data)
        rank = next((v.rank for v in graph.inputs if isinstance(v.type, TensorType)), array.ndim)
        return list(array) if array.ndim == rank + 1 else [array]
    if callable(data) and not hasattr(data, "__iter__"):
        data = data()
    if not isinstance(data, Iterable):
        raise CalibrationError(
            "this is no source of batches",
            expected="an iterable of dicts, arrays or tuples, a reader with get_next, or a folder",
            found=type(data).__name__,
        )
    return data


class _File:
    """A file of the folder, read when its turn comes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Any:
        return read_arrays(self.path)


def read_arrays(path: Path) -> Any:
    """The array of an .npy file, or those of an .npz by name; pickled contents are refused."""
    try:
        found = np.load(path, allow_pickle=False)
        if isinstance(found, np.ndarray):
            return found
        with found:
            return {name: found[name] for name in found.files}
    except (OSError, ValueError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error) as error:
        raise CalibrationError(
            f"cannot read {path.name}: {str(error) or type(error).__name__}",
            expected="an .npz or .npy file of plain numbers",
        ) from None


def _files(path: Path, graph: Graph) -> list[_File]:
    if path.is_file():
        return [_File(path)]
    if not path.is_dir():
        raise CalibrationError(f"there is no data at {path}")
    home = path.resolve()
    files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
    for file in files:
        if not file.resolve().is_relative_to(home):
            raise CalibrationError(
                f"{file.name} points outside its folder", hint="Copy the file into it."
            )
        if not file.is_file():
            raise CalibrationError(f"{file.name} is not a regular file")
        if file.suffix == ".npy" and len(graph.inputs) > 1:
            raise CalibrationError(
                f"{file.name} holds one array, and the model has {len(graph.inputs)} inputs",
                hint="Use .npz files with one array per input name.",
            )
    if not files:
        raise CalibrationError(f"{path} has no .npz and no .npy file")
    return [_File(file) for file in files]
