"""Traces a PyTorch module with batches of data as examples.

Axis 0 of every input is dynamic (`batch`), and so is every axis on which the examples differ; if
the module does not allow that, the shapes of the first example are static. The items of a dict are
passed to the parameters of `forward` by name, those of a tuple in order to those without a default.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from bitwright.errors import ImportModelError
from bitwright.frontend.torch import from_torch
from bitwright.ir.arrays import as_array
from bitwright.ir.graph import Graph

Array = np.ndarray[Any, Any]
Example = dict[str, Array]
_LABELS = frozenset({"label", "labels", "target", "targets"})


def trace_with(module: torch.nn.Module, batches: Sequence[Any]) -> Graph:
    """The graph of a module, traced with the first of these batches."""
    examples = [_arguments(module, batch) for batch in batches]
    shapes = {
        name: {
            axis: "batch" if axis == 0 else f"{name}_{axis}"
            for axis in range(array.ndim)
            if axis == 0 or len({_size(other, name, axis) for other in examples}) > 1
        }
        for name, array in examples[0].items()
    }
    try:
        example = _tensors(module, _at_least_two(examples[0]))
        return from_torch(module, (), example, dynamic_shapes=shapes)
    except ImportModelError:
        return from_torch(module, (), _tensors(module, examples[0]))


def _arguments(module: torch.nn.Module, item: Any) -> Example:
    """The arrays of a batch by parameter name of `forward`."""
    known = list(inspect.signature(module.forward).parameters.values())
    optional = {p.name for p in known if p.default is not inspect.Parameter.empty}
    if isinstance(item, Mapping):
        wanted = [p.name for p in known if p.name not in _LABELS & optional]
        return {name: as_array(item[name]) for name in wanted if name in item}
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    places = [p.name for p in known if p.kind in by_position]
    needed = [name for name in places if name not in optional] or places[:1]
    items = list(item) if isinstance(item, (tuple, list)) else [item]
    return {name: as_array(value) for name, value in zip(needed, items, strict=False)}


def _size(example: Example, name: str, axis: int) -> int | None:
    array = example.get(name)
    return array.shape[axis] if array is not None and axis < array.ndim else None


def _at_least_two(example: Example) -> Example:
    """The example with at least two samples: torch specializes a size of 1."""
    if any(array.ndim and len(array) != 1 for array in example.values()):
        return example
    return {name: np.repeat(a, 2, 0) if a.ndim else a for name, a in example.items()}


def _tensors(module: torch.nn.Module, example: Example) -> dict[str, torch.Tensor]:
    held = next(iter((*module.parameters(), *module.buffers())), None)
    device = "cpu" if held is None else held.device
    return {
        name: torch.as_tensor(np.ascontiguousarray(array)).to(device)
        for name, array in example.items()
    }
