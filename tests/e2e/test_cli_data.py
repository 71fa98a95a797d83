"""Options of the command line about data, sizes and inputs, and a score that fails."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

import bitwright as bw
from bitwright import demo
from bitwright.cli import main

TWICE = """
seen = []

def fails_later(model):
    seen.append(model)
    if len(seen) == 2:
        raise RuntimeError("no labels")
    return 1.0
"""


def call(*args, code=0):
    result = CliRunner().invoke(main, [str(a) for a in args])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def small(tmp_path):
    b = bw.Builder("small")
    w = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    graph = b.build(y=b.matmul(b.input("x", "f32[batch, 8]"), b.parameter("w", w)))
    graph.save(tmp_path / "small.bw")
    return tmp_path / "small.bw"


@pytest.fixture
def two_inputs(tmp_path):
    b = bw.Builder("two")
    graph = b.build(y=b.add(b.input("a", "f32[n]"), b.input("b", "f32[n]")))
    graph.save(tmp_path / "two.bw")
    return tmp_path / "two.bw"


@pytest.mark.parametrize("command", ["run", "inspect", "explain", "bench"])
def test_an_unknown_size_is_named(small, command):
    result = call(command, small, "--size", "bacth=4", code=2)
    text = " ".join(result.output.split())
    assert "there is no free size 'bacth'; expected 'batch'" in text
    assert "Did you mean 'batch'?" in text


def test_a_known_size_is_taken(small):
    facts = json.loads(call("run", small, "--size", "batch=3", "--json").stdout)
    assert facts["outputs"]["y"]["type"] == "f32[3, 4]"


def test_an_npy_file_is_the_input_of_a_model_with_one(small, two_inputs, tmp_path):
    np.save(tmp_path / "x.npy", np.ones((5, 8), np.float32))
    facts = json.loads(call("run", small, "--inputs", tmp_path / "x.npy", "--json").stdout)
    assert facts["outputs"]["y"]["type"] == "f32[5, 4]"
    result = call("run", two_inputs, "--inputs", tmp_path / "x.npy", code=2)
    text = " ".join(result.output.split())
    assert "has one array, but the model has 2 inputs; expected an .npz with 'a', 'b'" in text
    (tmp_path / "bad.npy").write_bytes(b"no array")
    assert "cannot read" in call("run", small, "--inputs", tmp_path / "bad.npy", code=2).output
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    torch.save(torch.ones(2), tmp_path / "x.pt")
    assert "cannot read" in call("run", small, "--inputs", tmp_path / "x.pt", code=2).output


def test_a_pytorch_file_is_no_model(tmp_path):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    assert "holds weights" in call("inspect", tmp_path / "w.pt", code=2).output


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_score_that_fails_keeps_the_finished_file_and_its_report(tmp_path, form):
    for i, batch in enumerate(demo.calibration()[:2]):
        np.savez(tmp_path / f"{i}.npz", **batch)
    script, output = tmp_path / "score.py", tmp_path / "q.onnx"
    script.write_text(TWICE)
    options = "--data", tmp_path, "-o", output, "--eval", f"{script}:fails_later", *form
    result = call("quantize", demo.model_path(), *options, code=2)
    assert "RuntimeError: no labels" in result.stderr
    assert f"finished, in {output}" in "".join(result.stderr.splitlines())
    assert bw.compile(output).output_names == ("logits",)
    if form:
        facts = json.loads(result.stdout)
        assert facts["layers"] and facts["scores"] == {"float": {"score": 1.0}}
    else:
        assert "multiply-adds" in result.stdout and "q.onnx" in result.stdout


def test_one_file_of_samples_and_its_batch_size(small, tmp_path):
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(70, 8)).astype(np.float32))
    stats = tmp_path / "stats"
    found = call("calibrate", small, "--data", tmp_path / "x.npy", "-o", stats, "--json")
    assert json.loads(found.stdout)["batches"] == 3
    options = "--data", tmp_path / "x.npy", "-o", stats, "--json", "--batch-size", 10
    assert json.loads(call("calibrate", small, *options).stdout)["batches"] == 7


def test_a_table_is_data(small, tmp_path):
    rows = np.random.default_rng(0).normal(size=(40, 9)).round(3)
    head = ",".join([*(f"x.{i}" for i in range(8)), "label"])
    np.savetxt(tmp_path / "data.csv", rows, delimiter=",", header=head, comments="")
    output = tmp_path / "q.bw"
    result = call("quantize", small, "--data", tmp_path / "data.csv", "-o", output)
    assert "columns 'label' match no input" in " ".join(result.stdout.split())
    assert output.exists()
    compared = call("compare", small, output, "--data", tmp_path / "data.csv")
    assert "note: columns 'label' match no input: ignored" in compared.stderr


def test_weights_alone_to_the_nearest_value_need_no_data(small, tmp_path):
    recipe = tmp_path / "recipe.json"
    recipe.write_text(json.dumps({"base": "w8", "rounding": "nearest"}))
    result = call("quantize", small, "-o", tmp_path / "q.onnx", "--recipe", recipe)
    assert "outputs not measured" in " ".join(result.stdout.split())
    assert bw.compile(tmp_path / "q.onnx").output_names == ("y",)
    text = call("quantize", small, "-o", tmp_path / "q.onnx", "--recipe", "w8", code=2).output
    assert '"rounding": "nearest"' in " ".join(text.split())


def test_folders_of_images_are_data(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    b = bw.Builder("images")
    x = b.input("x", "f32[batch, 3, 4, 6]")
    b.build(y=b.relu(x)).save(tmp_path / "m.bw")
    (tmp_path / "images").mkdir()
    for i in range(5):
        image.fromarray(np.full((9, 9, 3), 51 * i, np.uint8)).save(tmp_path / f"images/{i}.png")
    base = "calibrate", tmp_path / "m.bw", "--data", tmp_path / "images", "-o", tmp_path / "s"
    options = "--mean", "0.2,0,0", "--std", "1/255", "--batch-size", "2", "--layout", "nchw"
    facts = json.loads(call(*base, *options, "--resize", "4,6", "--json").stdout)
    assert facts["batches"] == 3
    (row,) = [row for row in facts["values"] if row["value"] == "x"]
    assert row["min"] == pytest.approx(-51, abs=1e-2) and row["max"] == pytest.approx(204, abs=1e-2)
    assert "is not HEIGHT,WIDTH" in call(*base, "--resize", "big", code=2).output
    assert "not a list of numbers" in call(*base, "--mean", "a", code=2).output
    np.save(tmp_path / "x.npy", np.ones((1, 3, 4, 6), np.float32))
    (tmp_path / "arrays").mkdir()
    np.save(tmp_path / "arrays/x.npy", np.ones((1, 3, 4, 6), np.float32))
    wrong = "calibrate", tmp_path / "m.bw", "--data", tmp_path / "arrays", "-o", tmp_path / "s"
    text = call(*wrong, "--std", "0.5", code=2).output
    assert "--std is for images" in " ".join(text.split())
