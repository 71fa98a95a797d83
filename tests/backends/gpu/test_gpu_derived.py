"""Ops with GPU kernels against the reference, on the samples of their declarations."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from on_gpu import compiled

import bitwright.backends.cpu.lowering.registered as cpu
from bitwright.backends.gpu.lowering import registered
from bitwright.backends.gpu.lowering.context import LOWERINGS
from bitwright.ir.dtype import dtype
from bitwright.ir.graph import Graph
from bitwright.ir.types import TensorType
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run
from bitwright.ops.core.opdef import Sample
from bitwright.ops.core.registry import all_ops, get

assert registered and cpu
VIEWS = ("reshape", "expand", "slice", "split", "transpose", "identity")
OPS = sorted((LOWERINGS.keys() | set(VIEWS)) & all_ops().keys())


def graph_of(op: str, case: Sample) -> tuple[Graph, dict[str, Any]]:
    b = Builder(op)
    given = {f"x{i}": np.asarray(x) for i, x in enumerate(case.inputs) if x is not None}
    inputs = {n: b.input(n, TensorType(dtype(x.dtype), x.shape)) for n, x in given.items()}
    operands = [inputs.get(f"x{i}") for i in range(len(case.inputs))]
    node = b.node(op, operands, case.attrs, [])
    return b.build(**{f"y{i}": value for i, value in enumerate(node.outputs)}), given


@pytest.mark.parametrize("op", OPS)
def test_samples(op: str) -> None:
    """Integers are equal; floats are as close as the sample demands. Fallbacks are allowed here."""
    for case in get(op).samples():
        graph, given = graph_of(op, case)
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            found = compiled(graph, fallbacks=True).run(given)
            expected = run(graph, given)
        for name, want in expected.items():
            have = found[name]
            assert (have.dtype, have.shape) == (want.dtype, want.shape), case
            if dtype(want.dtype).is_float:
                one, two = have.astype(np.float64), want.astype(np.float64)
                scale = np.abs(two[np.isfinite(two)]).max(initial=1e-30)
                element = {"f16": 1e-3, "bf16": 8e-3}.get(dtype(want.dtype).name, 0)
                if op == "f8_matmul" and torch.cuda.is_available():
                    element = 4e-3  # Hopper's tensor cores keep 13 bits of a sum
                near = max(case.tolerance, element)
                np.testing.assert_allclose(one, two, rtol=near, atol=near * scale)
            else:
                np.testing.assert_array_equal(have, want, err_msg=str(case))
