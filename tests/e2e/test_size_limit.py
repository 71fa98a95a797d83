"""BITWRIGHT_MAX_TENSOR_BYTES holds for every tensor that a run makes, its results among them; sizes
that no machine has memory for are refused the same way."""

import tracemalloc

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import bitwright as bw
from bitwright import knobs
from bitwright.errors import BitwrightError, RunError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
LIMIT = 1_000_000
F32, I64 = np.float32, np.int64
ONE, IMAGE = np.ones(1, F32), np.ones((1, 1, 2, 2), F32)


def cases(n):
    """Nodes whose result has about n elements: op, operands by name, attributes."""
    return {
        "Range": ("Range", {"a": F32(0), "b": F32(n), "c": F32(1)}, {}),
        "OneHot": (
            "OneHot",
            {"a": np.zeros(3, I64), "b": I64(n), "c": np.array([0, 1], F32)},
            {},
        ),
        "Expand": ("Expand", {"x": ONE, "s": np.array([n], I64)}, {}),
        "Tile": ("Tile", {"x": ONE, "s": np.array([n], I64)}, {}),
        "ConstantOfShape": ("ConstantOfShape", {"s": np.array([n], I64)}, {}),
        "ConstantOfShape, two sizes": ("ConstantOfShape", {"s": np.array([n, n], I64)}, {}),
        "Pad": ("Pad", {"x": ONE, "s": np.array([0, n], I64)}, {}),
        "Resize": ("Resize", {"x": IMAGE, "": 0, " ": 0, "s": np.array([1, 1, 2, n], I64)}, {}),
        "Resize, linear": (
            "Resize",
            {"x": IMAGE, "": 0, " ": 0, "s": np.array([1, 1, 2, n], I64)},
            {"mode": "linear"},
        ),
        "Resize by scales": (
            "Resize",
            {"x": IMAGE, "": 0, "s": np.array([1, 1, 1, n / 2], F32)},
            {},
        ),
        "HannWindow": ("HannWindow", {"s": I64(n)}, {}),
        "CenterCropPad": ("CenterCropPad", {"x": ONE, "s": np.array([n], I64)}, {}),
        "RandomNormal": ("RandomNormal", {}, {"shape": [n]}),
    }


def run(case, target, constants, times=3):
    """The shape of the result; `constants` are the operands that the file holds."""
    op, operands, attrs = case
    names = ["" if not name.strip() else name for name in operands]
    given = {name: np.asarray(v) for name, v in operands.items() if name.strip()}
    held = [numpy_helper.from_array(v, name) for name, v in given.items() if name in constants]
    fed = {name: v for name, v in given.items() if name not in constants}
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
        for name, v in fed.items()
    ]
    node = helper.make_node(op, names, ["y"], **attrs)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "sizes", inputs, [y], held)
    opset = helper.make_opsetid("", 21)
    model = helper.make_model(graph, opset_imports=[opset], ir_version=10)
    executable = bw.compile(bw.load(model), target=target)
    for _ in range(times):  # the second and third run are prepared for what the first found
        found = executable.run(fed)["y"]
    return found.shape


@pytest.fixture
def limit(monkeypatch):
    monkeypatch.setenv(knobs.MAX_TENSOR_BYTES.name, str(LIMIT))


@pytest.mark.parametrize("target", ["cpu", "reference"])
@pytest.mark.parametrize("constants", [(), ("x",), ("s", "a", "b", "c"), ("x", "s", "a", "b", "c")])
@pytest.mark.parametrize("name", cases(1))
def test_results_beyond_the_limit(name, constants, target, limit):
    n = LIMIT // 2  # twice the limit, as f32
    assert run(cases(8)[name], target, constants)
    tracemalloc.start()
    try:
        with pytest.raises(BitwrightError, match="MAX_TENSOR_BYTES moves the limit"):
            run(cases(n)[name], target, constants)
        assert tracemalloc.get_traced_memory()[1] < 4 * LIMIT
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("target", ["cpu", "reference"])
@pytest.mark.parametrize("constants", [(), ("x", "s", "a", "b", "c")])
@pytest.mark.parametrize("size", [2**40, 2**62])
@pytest.mark.parametrize("name", cases(1))
def test_sizes_that_nobody_has_memory_for(name, size, constants, target):
    with pytest.raises(BitwrightError, match=r"bytes|size"):
        run(cases(size)[name], target, constants)


@pytest.mark.parametrize("target", ["cpu", "reference"])
@pytest.mark.parametrize("end", [np.inf, np.nan, -np.inf])
def test_ranges_without_end(end, target):
    case = ("Range", {"a": F32(0), "b": F32(end), "c": F32(1)}, {})
    with pytest.raises(RunError):
        run(case, target, ())


@pytest.mark.parametrize("target", ["cpu", "reference"])
def test_operands_that_broadcast(target, limit):
    b = bw.Builder("broadcast")
    graph = b.build(y=b.add(b.input("x", "f32[n, 1]"), b.input("y", "f32[1, m]")))
    executable = bw.compile(graph, target=target)
    few, many = np.ones((10, 1), F32), np.ones((2000, 1), F32)
    with pytest.raises(RunError, match=r"16,000,000 bytes; expected at most 1,000,000"):
        executable.run({"x": many, "y": many.T})
    assert executable.run({"x": few, "y": many.T})["y"].shape == (10, 2000)


@pytest.mark.parametrize("target", ["cpu", "reference"])
def test_states(target, limit):
    b = bw.Builder("state")
    state = b.state("s", type_="f32[n, 4]")
    b.update(state, b.add(state, b.input("x", "f32[n, 4]")))
    executable = bw.compile(b.build(y=b.reduce_sum(state, axes=[0, 1])), target=target)
    with pytest.raises(RunError, match="would need"):
        executable.run({"x": np.ones((100_000, 4), F32)})


@pytest.mark.parametrize("target", ["cpu", "reference"])
def test_results_of_negative_size(target):
    """Sizes that only a run knows may cut off more than there is."""
    b = bw.Builder("cut")
    x = b.input("x", "f32[1, 2, h, 3, 3]")
    w = b.constant(np.ones((2, 1, 1, 1, 1), F32))
    graph = b.build(y=b.conv_transpose(x, w, pads=[2, 0, 0, 2, 0, 0]))
    executable = bw.compile(graph, target=target)
    assert executable.run({"x": np.ones((1, 2, 6, 3, 3), F32)})["y"].shape == (1, 1, 2, 3, 3)
    with pytest.raises(RunError, match=r"negative|larger than the result"):
        executable.run({"x": np.ones((1, 2, 1, 3, 3), F32)})
