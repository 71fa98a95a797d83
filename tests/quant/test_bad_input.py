"""bw.quantize with invalid data and models: one test per fault."""

import warnings

import numpy as np
import pytest

import bitwright as bw
from bitwright.errors import BitwrightError, CalibrationError, ExportError
from bitwright.warn import DataWarning

SHAPE = (2, 4, 6, 6)


def network(rng, dead=None):
    """Two convolutions and a product; `dead` output channels of the first have no weights."""
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    first = draw(8, 4, 3, 3)
    if dead is not None:
        first[dead] = 0
    b = bw.Builder("net")
    y = b.relu(b.conv(b.input("x", "f32[n, 4, 6, 6]"), first, name="first"))
    y = b.relu(b.conv(y, draw(8, 8, 3, 3), draw(8), name="second"))
    y = b.reduce_mean(y, axes=[2, 3], keepdims=False)
    return b.build(logits=b.matmul(y, draw(8, 5), name="last"))


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def batches(rng, count=4):
    return [{"x": rng.normal(size=SHAPE).astype(np.float32)} for _ in range(count)]


def run(model, batch):
    return bw.compile(model).run(batch)["logits"]


@pytest.mark.parametrize("empty", [[], (), iter([]), lambda: iter([])])
def test_no_data(rng, empty):
    with pytest.raises(CalibrationError, match=r"the data is empty; expected at least one batch"):
        bw.quantize(network(rng), empty)


@pytest.mark.parametrize("recipe", ["int8", "w8"])
def test_zero_samples_are_an_error_and_not_a_float_model(rng, recipe):
    empty = {"x": np.zeros((0, *SHAPE[1:]), np.float32)}
    for data in ([empty] * 3, [empty] * 5, empty["x"]):
        with pytest.raises(CalibrationError, match=r"the data has no samples.*batch axis 0"):
            bw.quantize(network(rng), data, recipe)
    some = [empty, *batches(rng), empty]  # a loader's last batch may be empty
    assert bw.quantize(network(rng), some, recipe).report.layers[0].scheme != "float"


def test_zero_samples_beside_an_input_of_fixed_size_are_an_error(rng):
    b = bw.Builder("two")
    x, y = b.input("x", "f32[n, 8]"), b.input("y", "f32[8]")
    w = rng.normal(size=(8, 4)).astype(np.float32)
    graph = b.build(z=b.matmul(b.add(x, y), w))
    batch = {"x": np.zeros((0, 8), np.float32), "y": np.ones(8, np.float32)}
    with pytest.raises(CalibrationError, match="no samples"):
        bw.quantize(graph, [batch] * 3)


def test_one_sample_works_and_is_noted(rng):
    graph, batch = network(rng), {"x": rng.normal(size=(1, *SHAPE[1:])).astype(np.float32)}
    with pytest.warns(DataWarning, match="only one batch"):
        q = bw.quantize(graph, [batch])
    assert "only one batch was seen" in str(q.report) and q.report.to_json()["notes"]
    exact = run(graph, batch)
    np.testing.assert_allclose(run(q, batch), exact, atol=0.03 * np.abs(exact).max())


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_values_name_value_and_batch(rng, bad):
    data = batches(rng)
    data[2]["x"][1, 3, 0, 0] = bad
    with pytest.raises(CalibrationError, match=r"batch 2 of the data: the value 'x' holds NaN or"):
        bw.quantize(network(rng), data)


def test_a_model_that_overflows_names_the_value(rng):
    b = bw.Builder("overflows")
    y = b.exp(b.input("x", "f32[n, 4]"), name="grown")
    graph = b.build(y=b.matmul(y, np.ones((4, 2), np.float32)))
    with pytest.raises(CalibrationError, match="'grown' holds NaN or infinity in 4 of its chan"):
        bw.quantize(graph, [{"x": np.full((1, 4), 1000, np.float32)}])


@pytest.mark.parametrize("value", [0.0, 0.75])
def test_constant_data_is_noted_in_the_report_and_warned_about(rng, value):
    graph, data = network(rng), [{"x": np.full(SHAPE, value, np.float32)}] * 3
    with pytest.warns(DataWarning, match=f"the data is constant .x is {value:g}"):
        q = bw.quantize(graph, data)
    assert "the data is constant" in str(q.report)
    exact = run(graph, data[0])
    np.testing.assert_allclose(run(q, data[0]), exact, atol=0.05 * np.abs(exact).max())
    assert "x: all values are" in "".join(bw.calibrate(graph, data).notes())


def test_data_that_varies_gives_no_note(rng):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert bw.quantize(network(rng), batches(rng)).report.notes == []


def test_all_zero_channels_of_weights_and_data(rng):
    graph, data = network(rng, dead=[0, 5]), batches(rng)
    for batch in data:
        batch["x"][:, 1] = 0
    q = bw.quantize(graph, data)
    assert q.report.int8_mac_fraction == 1
    fresh = batches(rng, 20)  # in which channel 1 speaks up after all
    exact, found = (np.stack([run(model, batch) for batch in fresh]) for model in (graph, q))
    assert ((found - exact) ** 2).mean() < 0.03 * (exact**2).mean()


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"y": np.zeros(SHAPE, np.float32)}, "batch 1 of the data: .*input 'x' is missing"),
        ({"x": np.zeros((2, 5, 6, 6), np.float32)}, "wrong size on axis 1"),
        ({"x": np.zeros((4, 6, 6), np.float32)}, "batch axis of 'x' missing"),
        ({"x": np.zeros(SHAPE)}, "wrong element type"),
    ],
)
def test_wrong_names_shapes_and_types_name_the_batch(rng, batch, message):
    with pytest.raises(CalibrationError, match=message):
        bw.quantize(network(rng), [*batches(rng, 1), batch])


def test_a_branch_that_no_batch_reaches_is_in_the_table(rng):
    weight = rng.normal(size=(8, 8)).astype(np.float32)
    bodies = {}
    for name in ("then", "else"):
        inner = bw.Builder(name)
        x = inner.input("x", "f32[n, 8]")
        bodies[name] = inner.build(inner.matmul(x, weight, name=f"{name}_product"))
    b = bw.Builder("branches")
    flag, x = b.input("flag", "bool[]"), b.input("x", "f32[n, 8]")
    y = b.matmul(b.if_(flag, x, name="choice", **bodies), weight, name="last")
    graph = b.build(logits=y)
    data = [
        {"flag": np.array(True), "x": rng.normal(size=(3, 8)).astype(np.float32)} for _ in range(4)
    ]
    q = bw.quantize(graph, data)
    rows = {layer.name: layer for layer in q.report.layers}
    unreached = rows["choice/else/else_product"]
    assert unreached.scheme == "float" and unreached.reason == "no calibration batch reached it"
    for name in ("choice/then/then_product", "last"):
        assert rows[name].scheme != "float"
    for flag in (True, False):
        batch = {**data[0], "flag": np.array(flag)}
        exact = run(graph, batch)
        np.testing.assert_allclose(run(q, batch), exact, atol=0.03 * np.abs(exact).max())


def test_a_model_with_nothing_to_quantize_comes_back_as_it_was():
    b = bw.Builder("plain")
    graph = b.build(logits=b.relu(b.input("x", "f32[n]")))
    data = [{"x": np.array([-1, 2], np.float32)}, {"x": np.array([3], np.float32)}]
    q = bw.quantize(graph, data)
    assert q.report.layers == [] and q.report.int8_mac_fraction == 0
    assert run(q, data[0]).tolist() == [0, 2]


@pytest.mark.parametrize("recipe", ["int8", "int8-static", "w8"])
def test_a_value_that_products_read_along_two_axes(rng, recipe):
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    b = bw.Builder("both")
    x = b.relu(b.input("x", "f32[n, 6, 9]"))
    rows = b.matmul(x, draw(9, 7), name="rows")
    graph = b.build(logits=rows, sums=b.conv(x, draw(6, 6, 3), name="columns"))
    data = [{"x": rng.normal(size=(2, 6, 9)).astype(np.float32)} for _ in range(40)]
    q = bw.quantize(graph, data, recipe)
    assert all(layer.sqnr_db > 30 for layer in q.report.layers)
    assert all(found > 30 for found in q.report.output_sqnr_db.values())
    match_dequantize = [node for node in q.graph.nodes if node.op in ("matmul", "conv")]
    assert all(node.inputs[1].node.op == "dequantize" for node in match_dequantize)


def test_an_output_that_cannot_be_written_leaves_nothing(rng, tmp_path):
    q = bw.quantize(network(rng), batches(rng))
    for path, message in (
        (tmp_path / "none" / "q.onnx", "cannot write"),
        (tmp_path / "q.pb", "no format is known"),
    ):
        with pytest.raises(ExportError, match=message):
            q.save(path)
    (tmp_path / "folder.onnx").mkdir()
    with pytest.raises(BitwrightError):
        q.save(tmp_path / "folder.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["folder.onnx"]


def test_a_write_that_breaks_off_keeps_the_old_file(rng, tmp_path, monkeypatch):
    q, path = bw.quantize(network(rng), batches(rng)), tmp_path / "q.bw"
    path.write_bytes(b"before")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    for suffix in (".bw", ".onnx"):
        with pytest.raises(BitwrightError, match="No space left"):
            q.save(path.with_suffix(suffix))
    with pytest.raises(BitwrightError, match="No space left"):
        q.report.save(path)
    assert path.read_bytes() == b"before"
    assert [file.name for file in tmp_path.iterdir()] == ["q.bw"]
