"""Compares a torch module with its import."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

import bitwright as bw
from bitwright.frontend.torch.tensors import array_of
from bitwright.ir.graph import Graph
from bitwright.ops.core.interpret import run


class Family(nn.Module):
    """Many functions of the same arguments in one module, so that one export covers them all."""

    def __init__(self, **functions: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.functions = functions

    def forward(self, *args: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: function(*args) for name, function in self.functions.items()}


def eager(module: nn.Module, *args: Any) -> dict[str, np.ndarray]:
    """The outputs by the names of the imported graph."""
    with torch.no_grad():
        result = module(*args)
    flat: dict[str, Any] = {}

    def walk(value: Any, path: tuple[str, ...]) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                walk(item, (*path, str(key)))
        elif isinstance(value, (tuple, list)):
            for i, item in enumerate(value):
                walk(item, (*(path or ("output",)), str(i)))
        else:
            flat[".".join(path or ("output",))] = value

    walk(result, ())
    return {
        name: array_of(value) if isinstance(value, torch.Tensor) else np.asarray(value)
        for name, value in flat.items()
    }


def feeds(graph: Graph, args: tuple[Any, ...]) -> dict[str, np.ndarray]:
    flat = [array_of(leaf) for leaf in torch.utils._pytree.tree_leaves(args)]
    return dict(zip((v.name for v in graph.inputs), flat, strict=True))


def assert_agree(
    graph: Graph,
    module: nn.Module,
    args: tuple[Any, ...],
    tolerance: float = 1e-4,
    states: dict[str, np.ndarray] | None = None,
) -> None:
    """Compare names, types, shapes and values of the graph's outputs with the module's."""
    copies = torch.utils._pytree.tree_map(lambda x: x.clone(), args)
    found = run(graph, feeds(graph, args), states=states)
    expected = eager(module, *copies)
    assert [name for name in found if not name.endswith(".updated")] == list(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        assert found[name].shape == array.shape, name
        exact = array.dtype.kind not in "fcV"
        wide = [a.astype(np.complex128 if a.dtype.kind == "c" else np.float64)
                for a in (found[name], array)]  # fmt: skip
        np.testing.assert_allclose(
            *wide,
            rtol=0 if exact else tolerance,
            atol=0 if exact else tolerance * max(np.nan_to_num(abs(wide[1])).max(initial=0), 1e-3),
            err_msg=name,
            equal_nan=True,
        )


def check(
    module: nn.Module,
    example: tuple[Any, ...],
    *others: tuple[Any, ...],
    dynamic_shapes: Any = None,
    tolerance: float = 1e-4,
) -> Graph:
    """Import with an example and compare on it and on others; the graph is verified by import."""
    graph = bw.from_torch(module, example, dynamic_shapes=dynamic_shapes)
    for args in (example, *others):
        assert_agree(graph, module, args, tolerance)
    return graph
