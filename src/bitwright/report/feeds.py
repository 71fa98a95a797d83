"""Inputs for a run: from a file, or random ones of the declared types."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bitwright.errors import RunError
from bitwright.ir.arrays import read_arrays
from bitwright.ir.dtype import string
from bitwright.ir.graph import Graph
from bitwright.ir.types import TensorType


def read_inputs(path: str | Path, graph: Graph) -> dict[str, Any]:
    """The arrays of an .npz by name, or the array of an .npy; pickled contents are refused."""
    found = read_arrays(path, RunError, what=f"inputs from {path}")
    if isinstance(found, dict):
        return found
    if len(graph.inputs) != 1:
        names = ", ".join(repr(value.name) for value in graph.inputs) or "none"
        raise RunError(
            f"{Path(path).name} has one array, but the model has {len(graph.inputs)} inputs",
            expected=f"an .npz with {names}",
        )
    return {graph.inputs[0].name: found}


def random_inputs(graph: Graph, sizes: Mapping[str, int], seed: int) -> dict[str, Any]:
    """Seeded inputs: floats in [-1, 1), integers 0 or 1 (always valid as indices and masks)."""
    rng = np.random.default_rng(seed)
    feeds: dict[str, Any] = {}
    for value in graph.inputs:
        type_ = value.type
        if not isinstance(type_, TensorType) or type_.dtype == string:
            raise RunError(f"cannot make a random {type_} for input {value.name!r}")
        at = {s.name: sizes.get(s.name, 1) for s in type_.symbols}
        shape = type_.concrete(at)
        if type_.dtype.is_float or type_.dtype.is_complex:
            feeds[value.name] = rng.uniform(-1, 1, shape).astype(type_.dtype.numpy)
        else:
            feeds[value.name] = rng.integers(0, 2, shape).astype(type_.dtype.numpy)
    return feeds
