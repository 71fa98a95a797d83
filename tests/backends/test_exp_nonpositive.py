"""e^x for x <= 0, as softmax uses it."""

import numpy as np
import onnx
import onnxruntime
import pytest
from run_kernel import TARGETS, function, named

from bitwright.backends.cpu.codegen.emit import Module, Signature, f32
from bitwright.backends.cpu.codegen.math.exp_nonpositive import (
    exp_nonpositive,
    exp_nonpositive_exact,
)


def evaluate(x, target, power=exp_nonpositive):
    """The function on an array whose length is a multiple of every number of lanes."""
    module = Module(target, "exp")
    with module.kernel("exp", Signature(("x", "y"), ("count",))) as f:
        x_, y_ = f.args.pointer("x"), f.args.pointer("y")
        vector = f32.vector(target.lanes(32))
        with f.loop(0, f.args.size("count"), vector.lanes) as loop:
            f.store(power(f, f.load(vector, x_, loop.index)), y_, loop.index)
    y = np.empty_like(x)
    signature = module.signatures["exp"]
    table = signature.pack(x=x.ctypes.data, y=y.ctypes.data, count=x.size)
    function(module.text(), "exp", target)(table.ctypes.data, 0, 1)
    return y


@pytest.mark.parametrize("name", TARGETS)
def test_accuracy(name):
    x = -np.abs(np.random.default_rng(0).exponential(8, 1 << 16)).astype(np.float32)
    y, exact = evaluate(x, named(name)), np.exp(x.astype(np.float64))
    assert np.abs(y - exact).max() < 2e-7
    near = x > -2
    assert (np.abs(y - exact) / exact)[near].max() < 2.5e-7


@pytest.mark.parametrize("name", TARGETS)
def test_limits(name):
    strange = np.array([0x7FC00001, 0xFFC12345], np.uint32).view(np.float32)  # NaN with payloads
    x = np.array([0, -0.0, -87.4, -88, -104, -1e4, -3e38, -np.inf, np.nan, *strange], np.float32)
    x = np.concatenate([x, np.zeros(-len(x) % 16, np.float32)])
    y = evaluate(x, named(name))
    assert (y[:2] == 1).all() and (y[2:8] == 0).all() and np.isnan(y[8:11]).all()


@pytest.mark.parametrize("name", [name for name in TARGETS if named(name).has_fma])
def test_the_exact_form_has_the_bits_of_onnx_runtime(name):
    x = -np.random.default_rng(1).exponential(8, 1 << 16).astype(np.float32)
    x[:3] = 0, np.nan, -1e30
    shape = onnx.helper.make_tensor_value_info("x", 1, [x.size])
    y = onnx.helper.make_tensor_value_info("y", 1, [x.size])
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Exp", ["x"], ["y"])], "exp", [shape], [y]
    )
    opsets = [onnx.helper.make_opsetid("", 17)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8)
    (theirs,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    found = evaluate(x, named(name), exp_nonpositive_exact)
    seen = ~(x < -79)
    np.testing.assert_array_equal(found[seen], theirs[seen])
    assert (found[~seen] < 1e-30).all()
