"""`bitwright quantize` on the demo model: file, report, the user's own score, refusals."""

import json
import os
import signal

import numpy as np
import onnxruntime
import pytest
from click.testing import CliRunner

import bitwright as bw
from bitwright import demo
from bitwright.cli import main
from bitwright.errors import BitwrightError
from bitwright.quant.data import sources as data_source
from bitwright.report.evaluate import Evaluation

SCRIPT = """
import numpy as np
from dataclasses import dataclass
from neighbour import held_out

@dataclass
class Sums:
    right: "int" = 0

def accuracy(model):
    print("evaluating")
    inputs, labels = held_out()
    return (model(inputs)["logits"].argmax(1) == labels).mean()

def both(model):
    return {"accuracy": accuracy(model), "bad": np.float32("nan")}

def fails(model):
    return 1 / 0

def text(model):
    return "good"

notes = 3
"""
KEPT = 0.99


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "data").mkdir()
    for i, batch in enumerate(demo.calibration()):
        np.savez(tmp_path / "data" / f"{i}.npz", **batch)
    return tmp_path / "data"


@pytest.fixture
def script(tmp_path):
    (tmp_path / "neighbour.py").write_text("from bitwright.demo import held_out\n")
    (tmp_path / "score.py").write_text(SCRIPT)
    return tmp_path / "score.py"


def call(*args, code=0):
    result = CliRunner().invoke(main, [str(a) for a in args])
    assert result.exit_code == code, result.output
    return result.output if code else result.stdout


def test_the_file_runs_here_and_in_onnx_runtime(tmp_path, folder):
    output = tmp_path / "q.onnx"
    text = call("quantize", demo.model_path(), "--data", folder, "-o", output)
    assert "multiply-adds" in text and "logits" in text and "q.onnx" in text
    inputs, labels = demo.held_out()
    logits = bw.compile(output).run(inputs)["logits"]
    (theirs,) = onnxruntime.InferenceSession(output).run(["logits"], inputs)
    for found in (logits, theirs):
        assert (found.argmax(1) == labels).mean() >= KEPT
    assert output.stat().st_size < 0.35 * demo.model_path().stat().st_size


def test_json_a_score_and_a_recipe_file(tmp_path, folder, script):
    recipe = tmp_path / "recipe.json"
    recipe.write_text(json.dumps({"base": "int8-static", "ignore": ["matmul"]}))
    output = tmp_path / "q.bw"
    facts = json.loads(
        call(
            *("quantize", demo.model_path(), "--data", folder, "-o", output, "--json"),
            *("--recipe", recipe, "--subset", 1, "--eval", f"{script}:both"),
        )
    )
    schemes = {row["op"]: row["scheme"] for row in facts["layers"]}
    assert (schemes["conv"], schemes["matmul"]) == ("static", "float")
    assert facts["file_bytes"] == [demo.model_path().stat().st_size, output.stat().st_size]
    for side in ("float", "quantized"):
        assert facts["scores"][side]["accuracy"] >= KEPT
        assert facts["scores"][side]["bad"] is None


def test_the_scores_stand_beside_each_other(tmp_path, folder, script):
    batch, output = folder / "0.npz", tmp_path / "q.onnx"
    options = "--recipe", "w8", "--eval", f"{script}:accuracy"
    text = call("quantize", demo.model_path(), "--data", batch, "-o", output, *options)
    assert "weights" in text and text.count("evaluating") == 2
    (line,) = [line for line in text.splitlines() if "score" in line and "0.99" in line]
    assert line.count("0.99") == 2


def test_data_that_tells_nothing_is_said(tmp_path):
    (name, array), *_ = demo.calibration()[0].items()
    np.savez(tmp_path / "zeros.npz", **{name: np.zeros_like(array[:1])})
    options = "--data", tmp_path / "zeros.npz", "-o", tmp_path / "q.bw", "--recipe", "w8"
    text = call("quantize", demo.model_path(), *options)
    assert "note: only one batch" in text and "note: the data is constant" in text
    arguments = [str(item) for item in ("quantize", demo.model_path(), *options, "--json")]
    facts = CliRunner().invoke(main, arguments)
    assert len(json.loads(facts.stdout)["notes"]) == 3 and "data is constant" in facts.stderr


def test_a_yaml_recipe(tmp_path, folder):
    pytest.importorskip("yaml")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text('base: w8\nignore: ["re:block2[.]conv[0-9]$"]\n')
    output, given = tmp_path / "q.onnx", ("--recipe", recipe, "--json")
    text = call("quantize", demo.model_path(), "--data", folder / "0.npz", "-o", output, *given)
    schemes = {row["name"]: row["scheme"] for row in json.loads(text)["layers"]}
    assert schemes["block2.conv1"] == schemes["block2.conv2"] == "float"
    assert schemes["widen"] == schemes["head"] == "weight_only"


def test_what_is_refused_is_said_at_once_and_writes_nothing(tmp_path, folder, script):
    model = tmp_path / "digits.onnx"
    model.write_bytes(demo.model_path().read_bytes())
    bad = tmp_path / "bad.json"
    bad.write_text('{"ignored": []}')
    (tmp_path / "empty").mkdir()
    given = {"--data": folder, "-o": tmp_path / "q.onnx"}
    before = sorted(tmp_path.rglob("*"))
    for options, message in (
        ({"--data": tmp_path / "none"}, "there is no data at"),
        ({"--data": tmp_path / "empty"}, "has no .npz and no .npy file"),
        ({"-o": tmp_path / "none" / "q.onnx"}, "cannot write"),
        ({"-o": tmp_path}, "no format is known"),
        ({"-o": tmp_path / "q.pb"}, "no format is known"),
        ({"-o": model}, "would replace"),
        ({"--recipe": "int3"}, "there is no recipe 'int3'"),
        ({"--recipe": tmp_path / "none.yaml"}, "cannot be read"),
        ({"--recipe": bad}, "no option 'ignored'"),
        ({"--eval": script}, "does not name a function"),
        ({"--eval": f"{script}:fails"}, "ZeroDivisionError"),
    ):
        pairs = [item for pair in (given | options).items() for item in pair]
        assert message in call("quantize", model, *pairs, code=2)
    assert model.read_bytes() == demo.model_path().read_bytes()
    assert [p for p in sorted(tmp_path.rglob("*")) if "__pycache__" not in p.parts] == before


def test_ranges_of_calibrate_give_static_schemes(tmp_path, folder):
    ranges, output = tmp_path / "ranges", tmp_path / "q.onnx"
    bw.calibrate(demo.model_path(), folder, save=ranges)
    facts = json.loads(
        call("quantize", demo.model_path(), "--statistics", ranges, "-o", output, "--json")
    )
    assert not facts["is_measured"] and "nothing was measured" in facts["notes"][0]
    assert {row["scheme"] for row in facts["layers"]} == {"static"}
    inputs, labels = demo.held_out()
    assert (bw.compile(output).run(inputs)["logits"].argmax(1) == labels).mean() > 0.9
    assert [path.name for path in tmp_path.glob("*statistics*")] == []
    wrong = call("quantize", demo.model_path(), "--data", folder, "--statistics", ranges,
                 "-o", output, code=2)  # fmt: skip
    assert "holds ranges" in wrong


def test_another_recipe_takes_its_statistics_from_a_file(tmp_path, folder):
    seen, output = tmp_path / "seen", tmp_path / "q.onnx"
    call("quantize", demo.model_path(), "--data", folder, "-o", output, "--statistics", seen)
    options = "--recipe", "w8", "--statistics", seen, "--json"
    facts = json.loads(call("quantize", demo.model_path(), "-o", tmp_path / "w8.onnx", *options))
    assert {row["scheme"] for row in facts["layers"]} == {"weight_only"}
    for options, message in (
        (["-o", tmp_path / "w8.onnx"], "data, or a file of statistics"),
        (["-o", output, "--statistics", tmp_path / "none"], "no file"),
        (["-o", output, "--statistics", output], "both"),
        (["-o", tmp_path / "q.bw", "--statistics", output], "is not a file of statistics"),
    ):
        assert message in call("quantize", demo.model_path(), *options, code=2)


@pytest.mark.parametrize("is_named", [True, False])
def test_an_interrupted_run_goes_on_with_the_same_command(tmp_path, folder, monkeypatch, is_named):
    read, output = data_source.read_arrays, tmp_path / "q.onnx"

    def interrupted(path, *options):
        if path.name == "2.npz":
            monkeypatch.setattr(data_source, "read_arrays", read)
            os.kill(os.getpid(), signal.SIGINT)
        return read(path, *options)

    monkeypatch.setattr(data_source, "read_arrays", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    seen = tmp_path / ("seen" if is_named else "q.onnx.statistics")
    command = ["quantize", demo.model_path(), "--data", folder, "-o", output]
    command += ["--statistics", seen] if is_named else []
    try:
        assert f"statistics of 3 batches are in {seen}; the same command" in call(
            *command, code=130
        )
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen.exists() and not output.exists()
    call(*command)
    assert output.exists() and seen.exists() == is_named
    assert output.read_bytes() == _saved(tmp_path / "once.onnx", folder)


def _saved(path, folder):
    bw.quantize(demo.model_path(), folder).save(path)
    return path.read_bytes()


@pytest.mark.skipif(not hasattr(os, "link"), reason="there are no hard links")
def test_the_model_under_another_name_is_not_replaced(tmp_path, folder):
    model, link = tmp_path / "digits.onnx", tmp_path / "other.onnx"
    model.write_bytes(demo.model_path().read_bytes())
    os.link(model, link)
    error = call("quantize", model, "--data", folder, "-o", link, code=2)
    assert "would replace" in error and model.read_bytes() == link.read_bytes()


def test_nor_are_its_weights(tmp_path, folder):
    model = tmp_path / "digits.onnx"
    bw.export_onnx(bw.load(demo.model_path()), model, external_data="q.onnx.data")
    weights = (tmp_path / "q.onnx.data").read_bytes()
    error = call("quantize", model, "--data", folder, "-o", tmp_path / "q.onnx", code=2)
    assert "would replace" in error and (tmp_path / "q.onnx.data").read_bytes() == weights


def test_scores_that_are_none(script, tmp_path):
    for name, message in (
        ("none", "has no function 'none'; expected .*accuracy, both"),
        ("notes", "has no function"),
    ):
        with pytest.raises(BitwrightError, match=message):
            Evaluation(f"{script}:{name}")
    with pytest.raises(BitwrightError, match=r"'text' of .* returned no number"):
        Evaluation(f"{script}:text").scores(lambda inputs: {})
    with pytest.raises(BitwrightError, match=r"line 19: .* failed in 'fails'"):
        Evaluation(f"{script}:fails").scores(lambda inputs: {})
    with pytest.raises(BitwrightError, match="there is no script"):
        Evaluation(f"{tmp_path / 'none.py'}:f")
    (tmp_path / "broken.py").write_text("x = (\n")
    with pytest.raises(BitwrightError, match=r"line 1: .*SyntaxError"):
        Evaluation(f"{tmp_path / 'broken.py'}:f")
