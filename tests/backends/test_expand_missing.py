"""Ops without a kernel run as the formula that their gradients are composed of."""

import numpy as np
import pytest
from run_kernel import assert_near, feeds_of, graph_of, reference

from bitwright.backends.cpu.lowering.expand_missing import expand_missing
from bitwright.ops.core.registry import get
from bitwright.pipeline import compile_graph
from bitwright.rewrite import Trace


@pytest.mark.parametrize("op", ["deform_conv", "col2im", "lora_matmul"])
def test_formula_agrees_with_the_interpreter(op):
    for case in get(op).samples()[:2]:
        graph = graph_of(op, *case.inputs, **case.attrs)
        feeds = feeds_of(graph, case.inputs)
        expected = reference(graph, feeds)
        exe = compile_graph(graph, threads=1)
        assert not list(exe.engine.fallbacks)
        for name, found in exe.run(feeds).items():
            assert_near(found, expected[name], max(10 * case.tolerance, 1e-5))


def test_a_formula_without_kernels_is_refused():
    graph = graph_of("cofactors", np.eye(3, dtype=np.float32))
    trace = Trace()
    assert expand_missing(graph, trace) is graph
    assert "no kernel for" in " ".join(map(str, trace.events))
