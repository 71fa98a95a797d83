"""Ops with kernels of their own: samples that kernels do not take have known reasons."""

import warnings

import numpy as np
import pytest
from on_gpu import node_graph

import bitwright as bw
from bitwright.ops.core.registry import get

OPS = (
    *("layer_norm", "rms_norm", "softmax", "log_softmax", "lp_norm", "dynamic_quantize"),
    *("group_norm", "instance_norm"),
    *(f"reduce_{n}" for n in ("sum", "mean", "prod", "max", "min", "l1", "l2", "log_sum_exp")),
    *("argmax", "argmin", "cumsum", "cumprod", "top_k"),
    *("gather", "gather_nd", "gather_elements", "scatter_nd", "scatter_elements"),
    *("tensor_scatter", "rotary", "resize", "max_pool", "avg_pool", "lp_pool"),
)
REFUSED = {
    "lp_norm": ("the norm of order",),
    **{f"reduce_{n}": ("there is no kernel for the",) for n in ("mean", "max", "min")},
    "top_k": ("that sorts", "for u64", "not sorted by one program"),
    "gather": ("wider than a register", "string"),
    "resize": ("crops", "interpolated u8"),
    "lp_pool": ("there is no kernel for this pooling",),
}
"""Reasons for which samples of an op run on the CPU."""


@pytest.mark.parametrize("op", OPS)
def test_kernels_take_the_samples(op: str) -> None:
    """A refusal is a known one; tests/backends/gpu/test_gpu_derived.py checks the results."""
    for case in get(op).samples():
        if any(np.asarray(x).dtype.kind in "OT" for x in case.inputs if x is not None):
            continue  # strings stay on the host
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            executable = bw.compile(node_graph(op, *case.inputs, **case.attrs), target="cuda")
        for step in executable.engine.fallbacks:  # type: ignore[attr-defined]
            assert any(text in step.why for text in REFUSED.get(op, ())), step.why
