"""Data sources, as sequences or streams of items.

an iterable of dicts, arrays or tuples          used directly
a reader with `get_next()`                      the interface of ONNX Runtime's quantizer
one array, dict of arrays, .npz or .npy file    split into batches if it holds many samples
a folder of .npz (by input name) or .npy        sorted by file name, one batch per file
a .csv file, or a folder of them                `tables`
a folder of images                              `images`
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from bitwright.errors import CalibrationError
from bitwright.ir.arrays import Array, as_array, read_arrays
from bitwright.ir.calibration import CalibrationRecord
from bitwright.ir.graph import Graph
from bitwright.ir.types import TensorType
from bitwright.quant.calibration.ranges import Ranges
from bitwright.quant.data.folders import files_in
from bitwright.quant.data.images import SUFFIXES as IMAGES
from bitwright.quant.data.images import Images
from bitwright.quant.data.splitting import in_batches
from bitwright.quant.data.tables import SUFFIXES as TABLES
from bitwright.quant.data.tables import Tables

ARRAYS = (".npz", ".npy")


@runtime_checkable
class Source(Protocol):
    """A data source that adapts to the model."""

    def batches_for(self, graph: Graph) -> Iterable[Any]: ...


class File:
    """A file of arrays, read on access."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Any:
        return read_arrays(self.path, CalibrationError)


class Folder:
    """A path with a batch size."""

    def __init__(self, path: str | Path, batch_size: int | None = None) -> None:
        self.path, self.batch_size = Path(path), batch_size

    def batches_for(self, graph: Graph) -> Iterable[Any]:
        return _at_path(self.path, graph, self.batch_size)


def source_of(data: Any, graph: Graph, batch_size: int | None = None) -> Iterable[Any]:
    """The items of the data for a model."""
    if isinstance(data, (Ranges, CalibrationRecord)):
        raise CalibrationError(
            f"{type(data).__name__} holds calibration results, not data",
            hint="quant.insert_q_dq(graph, ranges.record('int8', 'minmax')) uses it.",
        )
    if isinstance(data, (str, Path)):
        return _at_path(Path(data), graph, batch_size)
    if isinstance(data, Source):
        return data.batches_for(graph)
    if hasattr(data, "get_next"):
        return iter(data.get_next, None)
    if isinstance(data, Mapping):
        return in_batches(data, graph, batch_size)
    if isinstance(data, np.ndarray) or hasattr(data, "detach"):
        return _of_array(as_array(data), graph, batch_size)
    if callable(data) and not hasattr(data, "__iter__"):
        data = data()
    if not isinstance(data, Iterable):
        raise CalibrationError(
            "this is not a data source",
            expected="an iterable of dicts, arrays or tuples, a reader with get_next, or a path",
            found=type(data).__name__,
        )
    return data


def _of_array(array: Array, graph: Graph, batch_size: int | None) -> Iterable[Any]:
    rank = next((v.rank for v in graph.inputs if isinstance(v.type, TensorType)), array.ndim)
    if array.ndim == rank + 1:
        return list(array)
    return in_batches(array, graph, batch_size) if array.ndim == rank else [array]


def _at_path(path: Path, graph: Graph, batch_size: int | None) -> Iterable[Any]:
    if path.is_file():
        if path.suffix in TABLES:
            return Tables(path, batch_size=batch_size).batches_for(graph)
        if path.suffix.lower() in IMAGES:
            return Images(path, batch_size=batch_size).batches_for(graph)
        found = read_arrays(path, CalibrationError, mapped=True)
        if isinstance(found, Mapping):
            return in_batches(found, graph, batch_size)
        _require_one_input(path, graph)
        return _of_array(found, graph, batch_size)
    if not path.is_dir():
        raise CalibrationError(f"there is no data at {path}")
    files = files_in(path, ARRAYS)
    for file in files:
        if file.suffix == ".npy":
            _require_one_input(file, graph)
    if files:
        return [File(file) for file in files]
    for kind in (Tables, Images):
        if kind.are_in(path):
            return kind(path, batch_size=batch_size).batches_for(graph)
    raise CalibrationError(
        f"{path} has no .npz and no .npy file, no .csv and no images",
        expected=", ".join((*ARRAYS, *TABLES, *IMAGES)),
        hint="Save PyTorch tensors as arrays: numpy.savez(path, input=tensor.numpy())."
        if any(file.suffix in (".pt", ".pth") for file in path.iterdir())
        else "",
    )


def _require_one_input(path: Path, graph: Graph) -> None:
    if len(graph.inputs) > 1:
        raise CalibrationError(
            f"{path.name} holds one array, and the model has {len(graph.inputs)} inputs",
            hint="Use .npz files with one array per input name.",
        )
