"""`bitwright tune`: files, scores, SIGKILL and resuming."""

import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from click.testing import CliRunner

import bitwright as bw
from bitwright.cli import main
from bitwright.ir.container import to_bytes


@pytest.fixture
def folder(tmp_path):
    """A folder with model.onnx, data.npz and score.py."""
    rng = np.random.default_rng(0)
    b = bw.Builder("points")
    x = b.input("x", "f32[batch, 32]")
    for i in range(2):
        w = rng.normal(0, 0.2, (32, 32)).astype(np.float32)
        x = b.relu(b.matmul(x, b.parameter(f"w{i}", w)))
    b.build(y=x).save(tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", x=rng.normal(size=(256, 32)).astype(np.float32))
    (tmp_path / "score.py").write_text(
        "import time\n"
        "import numpy as np\n"
        "x = np.random.default_rng(5).normal(size=(64, 32)).astype(np.float32)\n"
        "def score(run):\n"
        "    return float(np.abs(run({'x': x})['y']).sum())\n"
        "def slow(run):\n"
        "    time.sleep(2)\n"
        "    return score(run)\n"
    )
    return tmp_path


def arguments(folder, *more):
    given = ("tune", folder / "model.onnx", "--data", folder / "data.npz", "--batch-size", 16,
             "-o", folder / "out.onnx", "--threads", 1, *more)  # fmt: skip
    return [str(one) for one in given]


def call(folder, *more, code=0):
    result = CliRunner().invoke(main, arguments(folder, *more))
    assert result.exit_code == code, result.output
    return result


def test_a_model_is_tuned_written_and_reproduced(folder):
    result = call(folder, "--eval", folder / "score.py", "--max-drop", "5%", "--json")
    found = json.loads(result.stdout)
    assert found["metric"]["name"] == "score" and found["stopped"]
    again = bw.tune(
        folder / "model.onnx", workdir=folder / "out.onnx.tune", resume=True, threads=1,
        eval=_named_score, max_drop="5%",
    )  # fmt: skip
    assert again.recipe == found["recipe"]
    recipe = json.loads((folder / "out.onnx.tune" / "recipe.json").read_text())
    assert recipe == found["recipe"]
    assert bw.load(folder / "out.onnx").inputs[0].name == "x"


def _named_score(run):
    raise AssertionError("every score is in the journal")


_named_score.__name__ = "score"


def test_the_table_names_layers_and_reasons(folder):
    report = folder / "report.html"
    options = "--budget", "20s", "--objective", "latency", "--report", report, "--no-latency"
    text = call(folder, *options).stdout
    assert "w0" in text and "float" in text and "recipe.json" in text
    assert "Pareto" in report.read_text(encoding="utf-8")
    assert json.loads(report.with_suffix(".json").read_text())["tune"]["objective"] == "latency"


def test_a_killed_search_leaves_its_best_model_and_continues(folder):
    command = [sys.executable, "-m", "bitwright"]
    more = ("--eval", f"{folder / 'score.py'}:slow", "--max-drop", "50%")
    process = subprocess.Popen([*command, *arguments(folder, *more)], stderr=subprocess.DEVNULL,
                               stdout=subprocess.DEVNULL)  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while not (folder / "out.onnx").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    first = bw.compile(folder / "out.onnx", threads=1)  # a whole, valid model
    assert first.run({"x": np.zeros((2, 32), np.float32)})["y"].shape == (2, 32)
    journal = folder / "out.onnx.tune" / "journal.jsonl"
    before = journal.read_text().splitlines()
    assert "trial" in {json.loads(line)["event"] for line in before}
    found = json.loads(call(folder, *more, "--resume", "--json").stdout)
    after = journal.read_text().splitlines()
    assert after[: len(before)] == before and len(after) > len(before)
    assert found["stopped"] not in ("interrupted", "the budget is used up")
    best = bw.load(folder / "out.onnx.tune" / "best.bw")
    assert to_bytes(best) and found["recipe"]


def test_errors_name_the_option(folder):
    assert "budget is not a time" in call(folder, "--budget", "soon", code=2).output
    assert "no script" in call(folder, "--eval", "missing.py", code=2).output
