"""Matrix products on the GPU: every form at awkward sizes; integers equal the CPU's."""

import ml_dtypes
import numpy as np
import pytest
from on_gpu import check_graph, check_node, compiled

import bitwright as bw
from bitwright.backends.gpu.kernels.matmul import tiles
from bitwright.ir.dtype import dtype

SIZES = [(1, 7, 16), (7, 1, 17), (16, 17, 33), (33, 127, 16), (127, 64, 127), (17, 256, 48)]
TOLERANCE = {np.float32: 1e-5, np.float16: 2e-2, ml_dtypes.bfloat16: 1e-1, np.float64: 1e-12}


def numbers(*shape, seed=0, element=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(element)


def integers(*shape, seed=0, element=np.int8):
    limits = np.iinfo(element)
    values = np.random.default_rng(seed).integers(limits.min, limits.max + 1, shape)
    return values.astype(element)


def families(exe):
    return [step.kernel.rpartition("_")[0] for step in exe.engine.artifact.schedule.steps]


def int8_layer(x, w, x_zero=3, row_scale=False, residual=False, activation="relu", rows=None):
    """x_q @ w_q with zero point, bias, scales, activation, residual and requantization."""
    b = bw.Builder("layer")
    count = rows or len(x)
    columns = w.shape[1]
    q = b.input("x", f"{dtype(x.dtype)}[{count}, {x.shape[1]}]")
    bias = b.constant(np.random.default_rng(5).integers(-999, 999, columns).astype(np.int32))
    sums = b.integer_matmul(q, b.constant(w), b.constant(np.array(x_zero, x.dtype)), None, bias)
    scale = (np.abs(numbers(columns, seed=2)) * 1e-3 + 1e-4).astype(np.float32)
    y = b.mul(b.cast(sums, to="f32"), b.constant(scale))
    feeds = {"x": x}
    if row_scale:
        y = b.mul(y, b.input("s", f"f32[{count}, 1]"))
        feeds["s"] = np.abs(numbers(len(x), 1, seed=3))
    y = getattr(b, activation)(y)
    if residual:
        y = b.add(y, b.input("r", f"f32[{count}, {columns}]"))
        feeds["r"] = numbers(len(x), columns, seed=4)
    zero = b.constant(np.array(5, np.int8))
    return b.build(y=b.requantize(b.mul(y, np.float32(20)), zero, to="i8")), feeds


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("element", [np.int8, np.uint8])
def test_int8_layers_are_equal_to_the_bit(size, element):
    rows, depth, columns = size
    x = integers(rows, depth, element=element)
    graph, feeds = int8_layer(x, integers(depth, columns, seed=1), row_scale=True, residual=True)
    exe = check_graph(graph, feeds)
    on_cpu = bw.compile(graph, target="cpu").run(feeds)["y"]
    np.testing.assert_array_equal(exe.run(feeds)["y"], on_cpu)


@pytest.mark.parametrize("element", [np.int8, np.uint8])
def test_a_long_product_with_few_tiles_is_split(element):
    graph, feeds = int8_layer(integers(5, 2048, element=element), integers(2048, 32, seed=1))
    exe = check_graph(graph, feeds)
    assert families(exe) == [f"matmul_{dtype(element)}_split", "matmul_sum_parts"]


def test_one_kernel_serves_any_number_of_rows():
    graph, feeds = int8_layer(integers(33, 64), integers(64, 48, seed=1), rows="n", row_scale=True)
    exe = check_graph(graph, feeds)
    for rows in (1, 130, 0):
        fewer = {"x": integers(rows, 64, seed=7), "s": np.ones((rows, 1), np.float32)}
        want = bw.compile(graph, target="reference").run(fewer)["y"]
        np.testing.assert_array_equal(exe.run(fewer)["y"], want)


@pytest.mark.parametrize("x_type", [np.int8, np.uint8])
@pytest.mark.parametrize("w_type", [np.int8, np.uint8])
def test_signedness_zero_points_and_bias(x_type, w_type):
    x, w = integers(2, 17, 33, element=x_type), integers(33, 20, seed=1, element=w_type)
    bias = np.arange(20, dtype=np.int32) * 77 - 900
    row_zero = integers(2, 17, 1, seed=2, element=x_type)
    column_zero = integers(20, seed=3, element=w_type)
    check_node("integer_matmul", x, w, row_zero, None, bias)
    check_node("integer_matmul", x, w, row_zero[0, 0, 0], column_zero, bias)
    batch = integers(2, 33, 20, seed=4, element=w_type)
    zeros = integers(2, 1, 20, seed=5, element=w_type)
    full = np.arange(340, dtype=np.int32).reshape(17, 20)
    check_node("integer_matmul", x, batch, row_zero, zeros, full)


def test_a_constant_weight_whose_zero_points_do_not_fold():
    b = bw.Builder("g")
    x = b.input("x", "u8[17, 40]")
    w, zeros = integers(40, 33, element=np.uint8), integers(33, seed=1, element=np.uint8)
    x_zero = b.input("z", "u8[17, 1]")
    y = b.integer_matmul(x, b.constant(w), x_zero, b.constant(zeros), None)
    points = integers(17, 1, seed=3, element=np.uint8)
    check_graph(b.build(y=y), {"x": integers(17, 40, seed=2, element=np.uint8), "z": points})


@pytest.mark.parametrize("x_type", [np.int8, np.uint8])
@pytest.mark.parametrize("w_type", [np.int8, np.uint8])
@pytest.mark.parametrize("depth", [48, 176])
def test_depths_that_tiles_do_not_fill(x_type, w_type, depth):
    """Rows of a multiple of 16 bytes: tiles come in vectors, which are cut at the end of K."""
    x, w = integers(17, depth, element=x_type), integers(depth, 48, seed=1, element=w_type)
    x_zero, w_zero = integers(17, 1, seed=2, element=x_type), integers(48, seed=3, element=w_type)
    check_node("integer_matmul", x, w, x_zero, w_zero, None)
    check_node("integer_matmul", x, w, None, None, None)
    b = bw.Builder("g")
    y = b.integer_matmul(b.input("x", f"{dtype(x_type)}[17, {depth}]"), b.constant(w), None, None)
    check_graph(b.build(y=y), {"x": x})


@pytest.mark.parametrize("element", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("size", [(7, 33, 17), (130, 64, 48)], ids=str)
def test_float_products(element, size):
    rows, depth, columns = size
    x, w = numbers(rows, depth, element=element), numbers(depth, columns, seed=1, element=element)
    check_node("matmul", x, w, atol=TOLERANCE[element])


@pytest.mark.parametrize("element", [np.float32, ml_dtypes.bfloat16])
def test_float_layers(element):
    for shape in ((2, 17, 128), (3, 2048)):
        b = bw.Builder("layer")
        x = b.input("x", f"{dtype(element)}[{', '.join(map(str, shape))}]")
        w = numbers(shape[-1], 40, seed=1, element=element)
        y = b.add(b.matmul(x, b.constant(w)), b.constant(numbers(40, seed=2, element=element)))
        atol = 5e-4 if element == np.float32 else 0.5
        check_graph(b.build(y=b.gelu(y)), {"x": numbers(*shape, element=element)}, atol=atol)


@pytest.mark.parametrize(
    "shapes",
    [
        ((2, 1, 3, 5), (4, 5, 6)),
        ((5,), (2, 5, 3)),
        ((2, 3, 5), (5,)),
        ((1, 7), (7, 1)),
    ],
    ids=str,
)
def test_shapes_of_products(shapes):
    x, w = (numbers(*shape, seed=n) for n, shape in enumerate(shapes))
    check_node("matmul", x, w, atol=1e-5)


def test_transposed_operands():
    b = bw.Builder("g")
    x, w = b.input("x", "f32[33, 17]"), b.input("w", "f32[20, 33]")
    y = b.matmul(b.transpose(x, perm=(1, 0)), b.transpose(w, perm=(1, 0)))
    check_graph(b.build(y=y), {"x": numbers(33, 17), "w": numbers(20, 33, seed=1)}, atol=1e-5)


@pytest.mark.parametrize("size", [(33, 64, 150), (130, 33, 70)], ids=str)
def test_large_tiles_run_their_tail_in_pieces(size, monkeypatch):
    rows, depth, columns = size
    tile = tiles.Tile(128, 128, 64, 4, 3)
    monkeypatch.setattr(tiles, "candidates", lambda *_: [tile])
    x, w = integers(rows, depth), integers(depth, columns, seed=1)
    graph, feeds = int8_layer(x, w, row_scale=True, residual=True)
    exe = check_graph(graph, feeds)
    configs = [s.configs[0].constants for s in exe.engine.artifact.kernels.values()]
    assert configs[0]["SUB"] == 4
    graph, feeds = int8_layer(x, w, activation="tanh")
    exe = check_graph(graph, feeds)
    assert [s.configs[0].constants["SUB"] for s in exe.engine.artifact.kernels.values()] == [2]


def test_results_repeat():
    graph, feeds = int8_layer(integers(5, 2048), integers(2048, 32, seed=1))
    exe = compiled(graph)
    np.testing.assert_array_equal(exe.run(feeds)["y"], exe.run(feeds)["y"])


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("element", [np.float32, ml_dtypes.bfloat16])
def test_operands_and_results_through_descriptors(persistent, element, monkeypatch):
    """Tiles reach over the edges of x, w, the residual and the result."""
    tile = tiles.Tile(64, 64, 64, 4, 3, persistent=persistent)
    monkeypatch.setattr(tiles, "candidates", lambda *_: [tile])
    monkeypatch.setattr(tiles, "prefers_tma", lambda *_: True)
    rows, depth, columns = 150, 96, 80
    kind = str(dtype(np.dtype(element)))
    b = bw.Builder("layer")
    w = b.constant(numbers(depth, columns, element=ml_dtypes.bfloat16, seed=1))
    y = b.matmul(b.input("x", f"bf16[{rows}, {depth}]"), w)
    y = b.add(b.cast(y, to=kind), b.input("r", f"{kind}[{rows}, {columns}]"))
    feeds = {
        "x": numbers(rows, depth, element=ml_dtypes.bfloat16),
        "r": numbers(rows, columns, element=element, seed=2),
    }
    exe = check_graph(b.build(y=b.relu(y)), feeds, rtol=2e-2, atol=1e-1)
    (source,) = exe.engine.artifact.kernels.values()
    assert {"x", "w", "y"} < set(source.descriptors)
