"""bw.convert: ops that stay in f32, and the files it writes."""

import numpy as np
import pytest
from small_models import all_learned

import bitwright as bw
from bitwright.errors import BitwrightError
from bitwright.quant.model.convert import convert

onnxruntime = pytest.importorskip("onnxruntime")
rng = np.random.default_rng(0)


def normal(*shape, scale=1.0):
    return (rng.normal(size=shape) * scale).astype(np.float32)


def block():
    """An embedding, a norm, two products around an activation, a softmax."""
    b = bw.Builder("block")
    ids = b.input("ids", "i64[batch, 6]")
    x = b.gather(b.parameter("table", normal(3000, 64)), ids, axis=0, name="embedded")
    y = b.layer_norm(x, b.parameter("gamma", 1 + normal(64, scale=0.1)), name="normed")
    y = b.gelu(b.matmul(y, b.parameter("up", normal(64, 128, scale=0.1))), name="hidden")
    y = b.add(x, b.matmul(y, b.parameter("down", normal(128, 64, scale=0.1))), name="sum")
    return b.build(y=b.softmax(y, axis=-1, name="rows"))


def image():
    b = bw.Builder("image")
    x = b.input("x", "f32[n, 3, 8, 8]")
    w = b.parameter("w", normal(8, 3, 3, 3, scale=0.2))
    y = b.relu(b.conv(x, w, b.parameter("bias", normal(8)), pads=[1, 1, 1, 1]))
    return b.build(y=b.reduce_mean(y, axes=[2, 3], keepdims=False))


CASES = {
    "block": (block, {"ids": np.array([[0, 2049, 2999, 7, 1, 2050]])}),
    "image": (image, {"x": normal(2, 3, 8, 8)}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["f16", "mixed", "mixed_bf16"])
def test_written_models_run_in_onnxruntime_with_their_own_types(case, name, tmp_path):
    make, feeds = CASES[case]
    graph = make()
    found = convert(graph, name, [feeds])
    exact = bw.compile(graph).run(feeds)["y"]
    plain, path = tmp_path / "plain.onnx", tmp_path / "half.onnx"
    graph.save(plain)
    found.save(path)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (theirs,) = session.run(None, feeds)
    ours = bw.compile(str(path)).run(feeds)["y"]
    room = np.abs(exact).max() * (0.02 if "bf16" in name else 0.004)
    assert theirs.dtype == ours.dtype == np.float32
    assert np.abs(theirs - exact).max() < room and np.abs(ours - exact).max() < room
    if case == "block":
        assert path.stat().st_size < 0.52 * plain.stat().st_size
    assert found.report.converted_bytes < 0.52 * found.report.float_bytes
    assert found.report.output_sqnr_db["y"] > (40 if "bf16" in name else 55)


def test_a_bf16_file_computes_in_bf16_when_loaded(tmp_path):
    found = convert(block(), "mixed_bf16")
    found.save(tmp_path / "half.onnx")
    types = {v.dtype.name for v in bw.load(tmp_path / "half.onnx").parameters}
    assert types == {"bf16"}
    exe = bw.compile(str(tmp_path / "half.onnx"))
    products = [n for n in exe.graph.nodes if n.op == "matmul"]
    assert {n.outputs[0].dtype.name for n in products} == {"bf16"}
    full = bw.compile(str(tmp_path / "half.onnx"), precision="f32")
    assert {n.outputs[0].dtype.name for n in full.graph.nodes if n.op == "matmul"} == {"f32"}
    found.save(tmp_path / "native.onnx", bf16_ops=True)
    native = bw.load(tmp_path / "native.onnx")
    assert {n.outputs[0].dtype.name for n in native.nodes if n.op == "matmul"} == {"bf16"}


def test_inputs_and_outputs_change_only_where_asked():
    kept, changed = (convert(image(), "f16", io=io).graph for io in (False, True))
    assert [str(v.dtype) for v in (kept.inputs[0], kept.outputs[0][1])] == ["f32", "f32"]
    assert [str(v.dtype) for v in (changed.inputs[0], changed.outputs[0][1])] == ["f16", "f16"]
    assert not any(node.op == "cast" for node in changed.nodes)


def exploding():
    """Squares of thousands, which no f16 holds, brought back by a norm; and tiny ones."""
    b = bw.Builder("exploding")
    x = b.input("x", "f32[4, 32]")
    large = b.mul(x, x, name="squares")
    small = b.relu(b.input("e", "f32[4, 32]"), name="tiny")
    y = b.layer_norm(large, b.parameter("gamma", np.ones(32, np.float32)), name="normed")
    return b.build(y=y, z=b.sqrt(small, name="back"))


def test_values_that_overflow_or_underflow_stay_in_f32_and_are_reported():
    data = [{"x": normal(4, 32, scale=1e3), "e": normal(4, 32, scale=1e-8)} for _ in range(3)]
    graph = exploding()
    blind = bw.compile(graph, precision="f16", target="reference").run(data[0])
    assert not np.isfinite(blind["y"]).all()
    found = convert(graph, "f16", data)
    assert (
        "too large" in found.report.kept["squares"] and "too large" in found.report.kept["normed"]
    )
    assert {"tiny", "back"} <= set(found.report.kept)
    assert "kept squares" in str(found.report)
    answer, exact = bw.compile(found.graph).run(data[0]), bw.compile(graph).run(data[0])
    for name, expected in exact.items():
        np.testing.assert_allclose(answer[name], expected, rtol=2e-2, atol=2e-2)
    ranges = bw.calibrate(graph, data, values=["squares"])
    assert "squares" in convert(graph, "f16", statistics=ranges).report.kept
    assert "squares" not in convert(graph, "mixed_bf16", data).report.kept


def test_a_shared_parameter_with_an_f32_reader_keeps_its_type():
    b = bw.Builder("shared")
    w = b.parameter("w", np.eye(4, dtype=np.float32))
    y = b.softmax(b.matmul(b.input("x", "f32[2, 4]"), w), axis=-1)
    graph = b.build(y=y, z=b.reduce_sum(w, axes=[0], keepdims=False))
    found = convert(graph, "mixed_conservative").graph
    assert str(found.value("w").dtype) == "f32"
    assert str(convert(graph, "mixed").graph.value("w").dtype) == "f16"


def test_no_data_is_an_error_when_it_is_given():
    with pytest.raises(BitwrightError, match="the data is empty"):
        convert(image(), "f16", [])


def test_float_layers_of_a_quantized_model_run_in_bf16(tmp_path):
    graph = block()
    data = [{"ids": rng.integers(0, 3000, (2, 6))} for _ in range(4)]
    learned = all_learned(data)
    plain, mixed = (bw.quantize(graph, learned, float_precision=p) for p in ("f32", "bf16"))
    mixed.save(tmp_path / "mixed.onnx")
    exe = bw.compile(str(tmp_path / "mixed.onnx"))
    found = {str(v.dtype) for n in exe.graph.nodes if n.op == "layer_norm" for v in n.outputs}
    assert found == {"bf16"}
    sums = [n for n in exe.graph.nodes if n.op == "integer_matmul"]
    assert len(sums) == 2 and {str(n.outputs[0].dtype) for n in sums} == {"i32"}
    feeds = data[0]
    exact, theirs = bw.compile(graph).run(feeds)["y"], bw.compile(plain.graph).run(feeds)["y"]
    error = np.abs(exe.run(feeds)["y"] - exact).max()
    assert error < np.abs(theirs - exact).max() + 0.01 * np.abs(exact).max()
    session = onnxruntime.InferenceSession(str(tmp_path / "mixed.onnx"))
    assert np.abs(session.run(None, feeds)[0] - exact).max() < 0.05 * np.abs(exact).max()


def test_the_command_converts_and_prints_what_it_kept(tmp_path):
    from click.testing import CliRunner

    from bitwright.cli import main

    exploding().save(tmp_path / "model.onnx")
    batch = {"x": normal(4, 32, scale=1e3), "e": normal(4, 32, scale=1e-8)}
    np.savez(tmp_path / "batch.npz", **batch)
    files = [str(tmp_path / name) for name in ("model.onnx", "half.onnx", "batch.npz")]
    command = ["convert", files[0], "--precision", "f16", "-o", files[1], "--data", files[2]]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    assert "kept squares" in done.output and "dB" in done.output
    answer = bw.compile(files[1]).run(batch)
    assert np.isfinite(answer["y"]).all()
    refused = CliRunner().invoke(main, [*command[:3], "f12", *command[4:]])
    assert refused.exit_code == 2 and "no precision 'f12'" in refused.output
