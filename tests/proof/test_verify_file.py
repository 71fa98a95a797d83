"""Files that carry a proof, and its verification."""

import base64
import json
import zlib

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

import bitwright as bw
from bitwright.cli import main
from bitwright.proof.layers import LayeredModel
from bitwright.proof.record import MOST_BYTES, PROOF_KEY, append_proof, read_proof
from quantized_kinds import KINDS, Draw


@pytest.fixture(scope="module")
def quantized():
    graph, feeds = KINDS["dense"](Draw())
    return bw.quantize(graph, [feeds() for _ in range(4)], recipe="int8-static")


@pytest.fixture
def path(quantized, tmp_path):
    quantized.save(tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def test_a_saved_file_verifies(path):
    found = bw.verify_file(path, ["onnxruntime"])
    assert found.is_ok, str(found)
    names = [check.name for check in found.checks]
    assert names[:2] == ["weights", "graph"]
    assert found.provenance["recipe"] == "int8-static"
    assert [scheme for _, scheme, _ in found.layers] == ["static", "static"]
    again = CliRunner().invoke(main, ["verify", str(path), "--json"])
    assert again.exit_code == 0 and json.loads(again.stdout)["is_ok"]


def test_a_flipped_bit_names_the_weight(path):
    model = onnx.load(path)
    weight = max(model.graph.initializer, key=lambda tensor: len(tensor.raw_data))
    data = path.read_bytes()
    at = data.index(weight.raw_data) + len(weight.raw_data) // 2
    path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
    found = bw.verify_file(path)
    assert not found.is_ok
    assert weight.name in found.checks[0].detail and "read by" in found.checks[0].detail
    result = CliRunner().invoke(main, ["verify", str(path)])
    assert result.exit_code == 1 and "NOT VERIFIED" in result.stdout


def test_a_changed_node_is_found(path):
    model = onnx.load(path)
    node = next(n for n in model.graph.node if n.op_type == "QuantizeLinear")
    node.name = "another"
    onnx.save(model, path)
    found = bw.verify_file(path)
    assert [c.name for c in found.checks if c.status == "failed"] == ["graph"]


def test_bitwrights_own_format(quantized, tmp_path):
    path = tmp_path / "model.bw"
    quantized.save(path)
    assert bw.verify_file(path).is_ok
    data = bytearray(path.read_bytes())
    data[data.index(b"BWPROOF1") - 40] ^= 1
    path.write_bytes(data)
    with pytest.raises(bw.BitwrightError, match="proof in the file is damaged"):
        bw.verify_file(path)
    weight = max((v.node.attrs["value"] for v in quantized.graph.constants), key=np.size)
    quantized.save(path)
    data = bytearray(path.read_bytes())
    data[data.index(weight.tobytes()) + 5] ^= 1
    path.write_bytes(data)
    assert [c.name for c in bw.verify_file(path).checks if c.status == "failed"] == ["weights"]


def test_without_a_proof(quantized, tmp_path):
    quantized.save(tmp_path / "plain.onnx", proof=False)
    assert (
        not onnx.load(tmp_path / "plain.onnx").metadata_props
        or read_proof(tmp_path / "plain.onnx")[0] is None
    )
    with pytest.raises(bw.BitwrightError, match="carries no proof"):
        bw.verify_file(tmp_path / "plain.onnx")
    result = CliRunner().invoke(main, ["verify", str(tmp_path / "missing.onnx")])
    assert result.exit_code == 2
    with pytest.raises(bw.BitwrightError, match="not a runtime"):
        bw.verify_file(tmp_path / "plain.onnx", "tflite")


def test_inputs_are_synthetic_unless_given(quantized, path):
    proof, _ = read_proof(path)
    (spec,) = proof.inputs
    extent = quantized.inputs["x"]
    assert (spec.low, spec.high) == (extent.low, extent.high) and spec.shape == (1, 96)
    assert not proof.arrays
    own = np.full((1, 96), 0.25, np.float32)
    quantized.save(path, proof={"x": own})
    proof, _ = read_proof(path)
    np.testing.assert_array_equal(proof.golden_inputs()["x"], own)
    assert bw.verify_file(path).is_ok
    with pytest.raises(bw.BitwrightError, match="too large for the file"):
        quantized.save(path, proof={"x": np.zeros((4096, 96), np.float32)})


def test_files_are_equal_and_the_proof_is_small(quantized, path, tmp_path):
    quantized.save(tmp_path / "again.onnx")
    assert path.read_bytes() == (tmp_path / "again.onnx").read_bytes()
    quantized.save(tmp_path / "plain.onnx", proof=False)
    plain = (tmp_path / "plain.onnx").stat().st_size
    assert path.stat().st_size - plain < max(1400, plain // 40)


def test_another_file_does_not_inherit_the_proof(path, tmp_path):
    bw.load(path).save(tmp_path / "other.onnx")
    keys = [p.key for p in onnx.load(tmp_path / "other.onnx").metadata_props]
    assert PROOF_KEY not in keys


def with_text(path, text):
    model = onnx.load(path)
    for entry in model.metadata_props:
        if entry.key == PROOF_KEY:
            entry.value = text
    onnx.save(model, path)


def packed(value):
    return base64.b64encode(zlib.compress(json.dumps(value).encode())).decode()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not base64!",
        base64.b64encode(b"no zlib").decode(),
        packed([]),
        packed({"version": 1, "unknown": 1}),
        packed({"version": 99}),
        packed({"version": 1, "inputs": [{"name": "x"}]}),
        packed(
            {
                "version": 1,
                "inputs": [{"name": "x", "dtype": "f32", "shape": [1 << 40], "low": 0, "high": 1}],
            }
        ),
        packed({"version": 1, "outputs": {"y": {"dtype": "zz"}}}),
        base64.b64encode(zlib.compress(b" " * (MOST_BYTES + 10))).decode(),
    ],
)
def test_a_damaged_proof_is_an_error(path, text):
    with_text(path, text)
    with pytest.raises(bw.BitwrightError, match="proof in the file is damaged"):
        bw.verify_file(path)


@pytest.mark.parametrize("recipe", ["w8", "w4"])
def test_models_without_data(recipe, tmp_path):
    b = bw.Builder("lookup")
    rng = np.random.default_rng(0)
    rows = b.gather(rng.normal(size=(40, 64)).astype(np.float32), b.input("ids", "i64[n, t]"))
    graph = b.build(y=b.matmul(rows, rng.normal(size=(64, 32)).astype(np.float32)))
    path = tmp_path / "lookup.onnx"
    rules = {"base": recipe, "rounding": "nearest"}
    bw.quantize(graph, recipe=rules).save(path)
    proof, _ = read_proof(path)
    assert proof.inputs[0].high <= 39
    assert proof.golden_inputs()["ids"].max() > 1
    found = bw.verify_file(path, "onnxruntime")
    assert found.is_ok, str(found)


def test_golden_outputs_that_cannot_be_made(tmp_path):
    b = bw.Builder("random")
    x = b.input("x", "f32[n, 4]")
    graph = b.build(y=b.add(x, b.random_normal(shape=(4,), dtype="f32")))
    from bitwright.proof.attach import attach_proof

    graph.save(tmp_path / "random.onnx")
    attach_proof(tmp_path / "random.onnx")
    found = bw.verify_file(tmp_path / "random.onnx")
    assert found.is_ok and found.checks[-1].status == "skipped"
    assert "random" in found.checks[-1].detail


def test_wrong_outputs_are_found(path):
    proof, _ = read_proof(path)
    golden = proof.outputs["y"]
    wrong = (golden.sampled() * 1.5).astype("<f4")
    text = base64.b64encode(wrong.tobytes()).decode()
    proof.outputs["y"] = type(golden)(golden.dtype, golden.shape, "AAAAAAAA", text)
    append_proof(path, proof)
    found = bw.verify_file(path)
    assert not found.is_ok and "dB from the recorded values" in found.checks[-1].detail


@pytest.mark.parametrize("kind", KINDS)
def test_layers_cover_every_node_once(kind, tmp_path):
    graph, feeds = KINDS[kind](Draw())
    q = bw.quantize(graph, [feeds() for _ in range(4)], recipe="int8")
    q.save(tmp_path / "model.onnx", consumer="any", proof=False)
    _, file = read_proof(tmp_path / "model.onnx")
    model = LayeredModel(file)
    computed = {name for layer in model.layers for name in layer.outputs}
    for layer in model.layers:
        for name in layer.inputs:
            assert name in computed or name in {i.name for i in model.graph.input}
    assert {o.name for o in model.graph.output} <= computed
