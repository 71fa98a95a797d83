"""Trace PyTorch modules with the first batches of the data as example inputs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bitwright.errors import CalibrationError, ImportModelError
from bitwright.frontend.torch import from_module, is_module
from bitwright.ir.arrays import read_arrays
from bitwright.quant.data.folders import files_in
from bitwright.quant.data.sources import ARRAYS

EXAMPLES = 4


def with_graph(model: Any, data: Any, transform: Any = None) -> tuple[Any, Any]:
    """The model, traced if it is a module, and the complete data."""
    if not is_module(model) or data is None:
        return model, data
    items, data = _first_items(data)
    if not items:
        raise CalibrationError("the data is empty", expected="at least one batch")
    if transform is not None:
        items = [transform(item) for item in items]
    return from_module(model, items), data


def _first_items(data: Any) -> tuple[list[Any], Any]:
    """The first items of the data, and the data including them."""
    if isinstance(data, (str, Path)):
        path = Path(data)
        files = files_in(path, ARRAYS)[:EXAMPLES] if path.is_dir() else [path]
        if not files:
            raise ImportModelError(
                f"{path} holds no arrays to trace the module with",
                expected=" or ".join(ARRAYS),
                hint="bw.from_torch(module, (x,)) returns a graph to use with other data.",
            )
        return [read_arrays(file, CalibrationError) for file in files], data
    if hasattr(data, "get_next"):
        data = iter(data.get_next, None)
    if isinstance(data, (Mapping, np.ndarray)) or hasattr(data, "detach"):
        return [data], data
    if callable(data) and not hasattr(data, "__iter__"):
        data = data()
    if not isinstance(data, Iterable):
        raise CalibrationError(
            "a module is traced with its data", expected="batches", found=type(data).__name__
        )
    items = list(itertools.islice(data, EXAMPLES))
    return items, itertools.chain(items, data) if isinstance(data, Iterator) else data
