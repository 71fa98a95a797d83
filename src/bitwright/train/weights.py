"""Trained weights by name: into PyTorch modules and into safetensors files."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bitwright.errors import TrainingError
from bitwright.frontend.parameters import ALIASES, parameters
from bitwright.ir.graph import Graph, nearest
from bitwright.train.safetensors_file import write_safetensors

Array = np.ndarray[Any, Any]


def copy_into(module: Any, weights: Mapping[str, Array], graph: Graph) -> None:
    """Copy weights into the parameters and buffers of a PyTorch module that have their names."""
    torch: Any = importlib.import_module("torch")
    targets = dict(module.state_dict(keep_vars=True))
    aliases = json.loads(graph.meta.get(ALIASES, "{}"))
    given = {**weights, **{a: weights[name] for a, name in aliases.items() if name in weights}}
    for name, array in given.items():
        if name not in targets:
            raise TrainingError(
                f"the module has no parameter {name!r}", hint=nearest(name, targets)
            )
        if tuple(targets[name].shape) != array.shape:
            raise TrainingError(
                f"parameter {name!r} of the module has another shape",
                expected=list(array.shape),
                found=list(targets[name].shape),
            )
    with torch.no_grad():
        for name, array in given.items():
            targets[name].copy_(torch.from_numpy(np.array(array, np.float64)).to(targets[name]))


def write_weights(path: str | Path, graph: Graph) -> None:
    """Write the parameters of a graph, and the values of its states, to a safetensors file."""
    held = {value.name: value.node.attrs.get("value") for value in graph.states}
    states = {name: array for name, array in held.items() if array is not None}
    write_safetensors(path, {**parameters(graph), **states}, {"format": "pt"})
