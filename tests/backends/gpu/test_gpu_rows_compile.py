"""Kernels of attention and rows compile for GPUs with their matrix instructions."""

import numpy as np
import pytest
from compile_ahead import compiled_facts

import bitwright as bw
from bitwright import pipeline
from bitwright.backends.base import find_backend
from bitwright.backends.gpu.lowering.build import build
from bitwright.backends.gpu.lowering.context import Machine

pytest.importorskip("triton")


MATRIX = {"flash 90": "HGMMA", "flash 80": "HMMA", "decode 90": "HMMA"}
"""The matrix instruction by form and capability."""


def attention(element, queries):
    def make(b):
        operands = (("q", queries), ("k", 256), ("v", 256))
        return [b.attention(*(b.input(n, f"{element}[1, 2, {s}, 64]") for n, s in operands))]

    return make


def norm(b):
    x, weight = b.input("x", "f32[64, 768]"), np.ones(768, np.float32)
    y = b.layer_norm(x, weight, weight)
    return [y, *b.dynamic_quantize(y, to="f8e4m3fn", per_token=True)]


def cases():
    """The first configuration of every kernel of a graph, by form and capability."""
    forms = {
        ("flash", 80): attention("f16", 256),
        ("flash", 90): attention("bf16", 256),
        ("decode", 90): attention("bf16", 1),
        ("norm", 90): norm,
    }
    for (name, capability), make in forms.items():
        b = bw.Builder(name)
        graph = b.build(**{f"y{n}": value for n, value in enumerate(make(b))})
        lowered = pipeline.optimize(graph, find_backend("cuda")).lowered
        machine = Machine(capability=divmod(capability, 10), interpreted=False)
        for source in build(lowered, machine).sources.values():
            yield f"{name} {capability} {source.family}", capability, source, source.configs[0]


def test_kernels_compile_with_few_spills():
    found = compiled_facts(list(cases()))
    assert len(found) >= 5
    for name, facts in found.items():
        assert facts["registers"] <= 255, (name, facts["registers"])
        assert facts["counts"].get("STL", 0) <= 4, (name, facts["counts"])
        matrix = MATRIX.get(" ".join(name.split()[:2]))
        if matrix and "join" not in name:
            assert facts["counts"].get(matrix), (name, facts["counts"])
