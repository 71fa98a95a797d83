"""`bench`: rows, ratios, JSON, and engines that are missing, fail or crash. No times checked."""

import json
import os

import numpy as np
import pytest
from click.testing import CliRunner

import bitwright as bw
from bitwright.cli import main
from bitwright.errors import BitwrightError
from bitwright.report.bench import Row, _summarize


@pytest.fixture
def graph():
    b = bw.Builder("dense")
    x = b.input("x", "f32[batch, 6]")
    w = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
    return b.build(y=b.relu(b.matmul(x, b.parameter("w", w))))


@pytest.fixture
def openvino_that(tmp_path, monkeypatch):
    """Installs a module `openvino` with this source for the worker processes."""

    def make(text):
        folder = tmp_path / "modules"
        folder.mkdir()
        (folder / "openvino.py").write_text(text)
        path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
        monkeypatch.setenv("PYTHONPATH", path)

    return make


MISSING = "raise ModuleNotFoundError('No module', name='openvino')"


def test_rows_of_every_engine_at_every_number_of_threads(graph, tmp_path, openvino_that):
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    openvino_that(MISSING)
    graph.save(tmp_path / "dense.onnx")
    result = bw.bench(tmp_path / "dense.onnx", threads=(1, 2), rounds=2, sizes={"batch": 5})
    assert result.inputs == {"x": "float32 [5, 6]"} and result.model == "dense"
    named = [(row.threads, row.engine) for row in result.rows]
    assert named == [(n, e) for n in (1, 2) for e in ("bitwright", "onnxruntime", "openvino")]
    for row in result.rows:
        if row.engine == "openvino":
            assert row.error == "openvino is not installed" and row.milliseconds is None
            continue
        low, high = row.quartiles
        assert len(row.seconds) == 2 and low <= row.milliseconds <= high and not row.error
        assert row.ready_seconds > 0 and row.version
        assert (row.times_best_peer is None) == (row.engine == "onnxruntime")
        assert row.engine == "bitwright" or row.difference < 1e-5


def test_peers_get_graphs_as_onnx_and_the_feeds(graph):
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    feeds = {"x": np.ones((7, 6), np.float32)}
    result = bw.bench(graph, against=["onnxruntime"], threads=[1], rounds=1, feeds=feeds)
    assert [row.error for row in result.rows] == ["", ""]
    assert result.inputs == {"x": "float32 [7, 6]"} and result.rows[1].difference < 1e-5


def test_a_crash_of_one_engine_does_not_affect_the_others(graph, openvino_that):
    openvino_that("import os, sys; print('out of luck', file=sys.stderr, flush=True); os._exit(3)")
    ours, dead = bw.bench(graph, against=["openvino"], threads=[1], rounds=1).rows
    assert dead.error == "the process exited with status 3: out of luck"
    assert ours.milliseconds > 0 and ours.times_best_peer is None


def test_wrong_feeds_give_a_row_with_an_error(graph):
    feeds = {"x": np.ones((7, 5), np.float32)}
    (row,) = bw.bench(graph, against=[], threads=[1], rounds=1, feeds=feeds).rows
    assert row.error.startswith("RunError: ") and row.seconds == []


@pytest.mark.parametrize(
    "options, message",
    [
        ({"against": ["abacus"]}, "no engine is named 'abacus'"),
        ({"rounds": 0}, "rounds and threads must be at least 1"),
        ({"threads": [0]}, "rounds and threads must be at least 1"),
    ],
)
def test_bad_options(graph, options, message):
    with pytest.raises(BitwrightError, match=message):
        bw.bench(graph, **options)


def test_ratios_are_per_round():
    ours = Row("bitwright", 1, seconds=[1.0, 10.0, 1.0])
    first = Row("onnxruntime", 1, seconds=[2.0, 20.0, 9.0])
    second = Row("openvino", 1, seconds=[3.0, 15.0, 1.5])
    _summarize([ours, first, second])
    assert ours.milliseconds == 1000 and ours.times_best_peer == 1.5
    assert first.times_best_peer == 0.75 and second.times_best_peer == pytest.approx(4 / 3)


def test_command_line(graph, tmp_path, openvino_that):
    openvino_that(MISSING)
    path, figures = tmp_path / "dense.onnx", tmp_path / "figures.json"
    graph.save(path)
    args = ["bench", str(path), "--threads", "1", "--rounds", "1", "--json", str(figures)]
    result = CliRunner().invoke(main, args)
    assert result.exit_code == 0, result.output
    assert "openvino is not installed" in " ".join(result.output.replace("│", " ").split())
    rows = json.loads(figures.read_text())["rows"]
    assert [row["engine"] for row in rows] == ["bitwright", "onnxruntime", "openvino"]
    assert CliRunner().invoke(main, [*args, "--threads", "1,x"]).exit_code == 2
    missing = CliRunner().invoke(main, [*args, "--feeds", "missing.npz"])
    assert missing.exit_code == 2 and "cannot read inputs" in missing.output
