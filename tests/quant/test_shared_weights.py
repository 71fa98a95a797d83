"""A weight with several readers is rounded once and stored once."""

import numpy as np
import pytest

import bitwright as bw
from bitwright.ir.dtype import i8
from bitwright.quant.model.points import find_points
from bitwright.quant.model.stages import simplify
from other_runtimes import onnxruntime_is_exact

WORDS, WIDTH, STEPS = 512, 64, 20


def draw(*shape, seed=0):
    rng = np.random.default_rng([seed, *shape])
    return (rng.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)


def sqnr(exact, found):
    return 10 * np.log10((exact**2).sum() / max(((exact - found) ** 2).sum(), 1e-30))


def tied(is_folded=False):
    """A language model whose head is its embedding, written once or, by an exporter, twice."""
    b = bw.Builder("tied")
    table = b.parameter("embedding.weight", draw(WORDS, WIDTH))
    h = b.gather(table, b.input("ids", "i64[n, t]"), axis=0, name="embedded")
    h = b.add(h, b.gelu(b.matmul(h, b.parameter("mid.weight", draw(WIDTH, WIDTH)), name="mid")))
    h = b.rms_norm(h, np.ones(WIDTH, np.float32))
    head = b.transpose(table, perm=(1, 0))
    if is_folded:
        head = b.parameter("head.weight", np.ascontiguousarray(draw(WORDS, WIDTH).T))
    return b.build(logits=b.matmul(h, head, name="head"))


def unrolled(steps=STEPS):
    """An unrolled recurrent network."""
    b = bw.Builder("unrolled")
    x = b.input("x", f"f32[n, {steps}, {WIDTH}]")
    names = "weight_ih", "weight_hh"
    w, r = (b.parameter(f"cell.{name}", draw(WIDTH, WIDTH, seed=i)) for i, name in enumerate(names))
    bias, h = b.parameter("cell.bias", draw(WIDTH)), None
    for step in range(steps):
        token = b.gather(x, np.array(step), axis=1)
        total = b.add(b.matmul(token, b.transpose(w, perm=(1, 0)), name=f"in{step}"), bias)
        if h is not None:
            total = b.add(total, b.matmul(h, b.transpose(r, perm=(1, 0)), name=f"state{step}"))
        h = b.tanh(total)
    return b.build(y=h)


def tokens(count=8, seed=0):
    rng = np.random.default_rng(seed)
    return [{"ids": rng.integers(0, WORDS, (2, 16))} for _ in range(count)]


def steps(count=8, seed=0, length=STEPS):
    rng = np.random.default_rng(seed)
    return [{"x": rng.normal(size=(4, length, WIDTH)).astype(np.float32)} for _ in range(count)]


def qvalues(graph):
    """The i8 constants that are matrices."""
    constants = (node.outputs[0] for _, node in graph.walk() if node.op == "constant")
    return [value for value in constants if value.dtype == i8 and value.rank > 1]


@pytest.mark.parametrize("is_folded", [False, True])
@pytest.mark.parametrize("recipe", ["int8", "int8-static", "w8", "w4", "nvfp4"])
def test_tied_embedding_and_head_share_one_constant(is_folded, recipe, tmp_path):
    graph = tied(is_folded)
    q = bw.quantize(graph, tokens(), recipe)
    graph.save(tmp_path / "float.onnx")
    q.save(tmp_path / "q.onnx")
    copies = 2 if is_folded else 1
    assert q.report.float_bytes == pytest.approx(4 * WIDTH * (copies * WORDS + WIDTH), rel=0.02)
    for path, held in ("float", q.report.float_bytes), ("q", q.report.quantized_bytes):
        assert (tmp_path / f"{path}.onnx").stat().st_size == pytest.approx(held, abs=1.5e4)
    assert q.report.weights_rounded == 2
    tables = [value for value in qvalues(q.graph) if value.shape == (WORDS, WIDTH)]
    assert len(tables) == 1  # of 8 bits, also where other weights have 4
    schemes = {layer.value: layer.scheme for layer in q.report.layers}
    assert schemes["embedded"] == "weight_only" and schemes["head"] != "float"
    (test,) = tokens(1, seed=1)
    found = bw.compile(q).run(test)["logits"]
    assert sqnr(bw.compile(graph).run(test)["logits"], found) > 22
    again = bw.compile(tmp_path / "q.onnx").run(test)["logits"]
    np.testing.assert_array_equal(again, found)


def test_a_tied_lookup_is_as_exact_as_a_separate_one():
    """Rounding weights lookups and products equally."""
    both = bw.quantize(tied(), tokens()).report
    alone = bw.quantize(tied(), tokens(), {"targets": ["embedding"], "ignore": []}).report
    rows = {layer.name: layer for layer in both.layers}
    assert rows["embedded"].sqnr_db > 38 and rows["head"].sqnr_db > 38
    # the head stays float here, and so does what it shares
    assert {layer.scheme for layer in alone.layers} == {"float"}
    assert alone.weights_rounded == 0 and alone.float_bytes == alone.quantized_bytes
    (row,) = (layer for layer in alone.layers if layer.name == "embedded")
    assert "head" in row.reason and "float" in row.reason


def test_tied_weights_in_onnx_runtime(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    q = bw.quantize(tied(), tokens())
    q.save(tmp_path / "q.onnx")
    (test,) = tokens(1, seed=1)
    (theirs,) = onnxruntime.InferenceSession(tmp_path / "q.onnx").run(None, test)
    if onnxruntime_is_exact():
        assert sqnr(bw.compile(q).run(test)["logits"], theirs) > 40


def test_a_tied_module_of_torch():
    torch = pytest.importorskip("torch")

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(WORDS, WIDTH)
            self.head = torch.nn.Linear(WIDTH, WORDS, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids):
            return self.head(torch.tanh(self.embedding(ids)))

    torch.manual_seed(0)
    graph = bw.from_torch(Model().eval(), (torch.zeros(2, 16, dtype=torch.long),))
    q = bw.quantize(graph, [{graph.inputs[0].name: batch["ids"]} for batch in tokens()])
    assert q.report.float_bytes == 4 * WORDS * WIDTH
    assert q.report.weights_rounded == 1 and len(qvalues(q.graph)) == 1
    assert q.report.quantized_bytes < 0.3 * q.report.float_bytes


@pytest.mark.parametrize("recipe", ["int8", "int8-static", "w8", "w4"])
def test_a_network_unrolled_in_time(recipe, tmp_path):
    graph = unrolled()
    q = bw.quantize(graph, steps(), recipe)
    assert q.report.weights_rounded == 2
    assert len([n for n in q.graph.nodes if n.op == "matmul"]) == 2 * STEPS - 1
    assert q.report.int8_mac_fraction == (1 if recipe.startswith("int8") else 0)
    held = 4 * WIDTH * (2 * WIDTH + 1)
    assert q.report.float_bytes == pytest.approx(held, rel=0.01)
    assert q.report.quantized_bytes < 0.5 * held
    if recipe == "int8":
        assert len(qvalues(q.graph)) == 2
    q.save(tmp_path / "q.onnx")
    assert (tmp_path / "q.onnx").stat().st_size < q.report.quantized_bytes + 5e4
    (test,) = steps(1, seed=1)
    found = bw.compile(q).run(test)["y"]
    assert sqnr(bw.compile(graph).run(test)["y"], found) > (18 if recipe == "w4" else 30)
    np.testing.assert_array_equal(bw.compile(tmp_path / "q.onnx").run(test)["y"], found)


def test_statistics_do_not_grow_with_the_steps():
    """Rows and second moments are those of one weight, however often it is read."""
    from bitwright.quant.calibration.stats import StatsBuilder

    held = []
    for length in (2, STEPS):
        graph = simplify(unrolled(length))
        builder = StatsBuilder(graph, find_points(graph), count=8)
        for batch in steps(length=length):
            builder.step(batch)
        samples = [s for e in builder.stats.values() for s in e.samples.values()]
        assert len(samples) == 2
        held.append(sum(s.gram.nbytes + s.scored.nbytes for s in samples))
    assert held[1] < 5 * held[0]  # few rows of two steps, not ten times as many


def test_inputs_of_one_weight_share_one_range():
    """The static scale is that of the widest input."""
    b = bw.Builder("ranges")
    w = b.parameter("w", draw(WIDTH, WIDTH))
    x, y = (b.input(name, f"f32[n, {WIDTH}]") for name in "xy")
    graph = b.build(a=b.matmul(x, w), b=b.matmul(y, w))
    (point,) = find_points(simplify(graph))
    assert [value.name for value in point.values] == ["x", "y"] and len(point.distinct) == 1
    rng = np.random.default_rng(0)
    batch = lambda: {
        name: (size * rng.normal(size=(32, WIDTH))).astype(np.float32)
        for name, size in (("x", 1), ("y", 3))
    }
    made = bw.quantize(graph, [batch() for _ in range(8)], "int8-static").graph
    scales = {node.inputs[1] for node in made.nodes if node.op == "quantize"}
    arrays = {value.node.attrs["value"].tobytes() for value in scales}
    assert len(arrays) == 1 and sum(node.op == "quantize" for node in made.nodes) == 2


def test_rows_of_all_values_have_equal_weight():
    from bitwright.quant.calibration.stats import StatsBuilder

    graph = simplify(unrolled(3))
    points = find_points(graph)
    builder = StatsBuilder(graph, points, count=1)
    (batch,) = steps(1, length=3)
    builder.step(batch)
    (sample,) = builder.stats[points[0].name].samples.values()
    tokens_seen = batch["x"].reshape(-1, WIDTH)
    assert sample.counted == len(tokens_seen)
    np.testing.assert_allclose(sample.mean[0], tokens_seen.mean(axis=0), atol=1e-5)
    first = sample.first[:3, 0]  # one row of each step
    places = [int(np.abs(batch["x"] - row).sum(axis=-1).min(axis=0).argmin()) for row in first]
    assert sorted(places) == [0, 1, 2]


def test_layers_of_two_branches_do_not_share_weights():
    """Each branch is a graph with its own constants."""
    w, bodies = draw(WIDTH, WIDTH), {}
    for name in ("then", "else"):
        inner = bw.Builder(name)
        x = inner.input("x", f"f32[n, {WIDTH}]")
        bodies[name] = inner.build(inner.matmul(x, w, name="layer"))
    b = bw.Builder("branches")
    flag, x = b.input("flag", "bool[]"), b.input("x", f"f32[n, {WIDTH}]")
    graph = b.build(y=b.if_(flag, x, **bodies))
    rng = np.random.default_rng(0)
    data = [
        {"flag": np.array(i % 2 == 0), "x": rng.normal(size=(8, WIDTH)).astype(np.float32)}
        for i in range(8)
    ]
    q = bw.quantize(graph, data)
    assert q.report.weights_rounded == 2 and q.report.int8_mac_fraction == 1
    for batch in data[:2]:
        exact = bw.compile(graph).run(batch)["y"]
        assert sqnr(exact, bw.compile(q).run(batch)["y"]) > 35
