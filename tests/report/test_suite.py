"""The benchmark suite: rows, files, baselines and the command. No times are checked."""

import csv
import io
import json
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

import bitwright as bw
from bitwright.cli import main
from bitwright.errors import BitwrightError
from bitwright.report.suite.cases import NAMES, OPS, op_cases
from bitwright.report.suite.results import SuiteResult, SuiteRow, compare_with
from bitwright.report.suite.run import bench_suite


@pytest.fixture(scope="module")
def result():
    return bench_suite(["softmax", "depthwise"], quick=True, threads=1, rounds=2)


def test_rows(result):
    named = [(row.suite, row.precision) for row in result.rows]
    assert named == [
        *(("softmax", p) for p in ("f32", "bf16")),
        *(("depthwise", p) for p in ("f32", "bf16", "int8")),
    ]
    for row in result.rows:
        low, high = row.quartiles
        assert not row.error and row.best <= low <= row.milliseconds <= high
        assert row.rounds == 2 and row.calls >= 1
        assert (row.gflops is None) == (row.suite == "softmax") != (row.gbytes is None)
    by = {(row.suite, row.precision): row for row in result.rows}
    assert by["softmax", "f32"].sqnr_db > 100 > by["softmax", "bf16"].sqnr_db > 35
    assert by["depthwise", "int8"].sqnr_db > 25
    assert by["depthwise", "int8"].memory_bytes < by["depthwise", "f32"].memory_bytes
    assert result.machine["cores"] >= 1 and result.machine["processor"]


@pytest.mark.parametrize("suite", OPS)
def test_every_case_builds(suite):
    assert op_cases(suite, quick=True)
    for case in op_cases(suite, quick=False):
        graph, batches = case.make()
        assert batches[0].keys() == {value.name for value in graph.inputs}
        assert "f32" in case.precisions


def test_files(result, tmp_path):
    result.save(tmp_path / "a.json")
    assert SuiteResult.load(tmp_path / "a.json").rows == result.rows
    result.save(tmp_path / "a.csv")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "a.csv").read_text())))
    assert [row["precision"] for row in rows] == [row.precision for row in result.rows]
    assert float(rows[0]["milliseconds"]) == result.rows[0].milliseconds
    assert str(result.machine["cores"]) in rows[0]["machine"]
    for text in ("{}", "[1", '{"format": 3}'):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(BitwrightError, match="not a result of the benchmark suite"):
            SuiteResult.load(tmp_path / "bad.json")


def row(milliseconds, low, high, **others):
    more = {"memory_bytes": 1000, "sqnr_db": 40.0} | others
    return SuiteRow("matmul", "m", "f32", 1, milliseconds, (low, high), **more)


@pytest.mark.parametrize(
    ("now", "verdict"),
    [
        (row(1.03, 1.02, 1.04), "same"),  # less than 5%
        (row(1.5, 0.95, 1.6), "same"),  # the quartiles overlap
        (row(1.2, 1.1, 1.3), "slower"),
        (row(0.8, 0.7, 0.9), "faster"),
        (row(1.0, 0.9, 1.1, sqnr_db=38.0), "less accurate"),
        (row(1.0, 0.9, 1.1, sqnr_db=None), "same"),
        (row(1.2, 1.1, 1.3, memory_bytes=1100), "slower, more memory"),
        (replace(row(1.0, 0.9, 1.1), precision="bf16"), "new"),
        (replace(row(1.0, 0.9, 1.1), error="no"), "failed"),
    ],
)
def test_verdicts(now, verdict):
    machine = {"processor": "a", "cores": 1, "features": []}
    found = SuiteResult(machine, [now])
    compare_with(found, SuiteResult(machine, [row(1.0, 0.95, 1.05)]))
    assert found.rows[0].verdict == verdict
    is_worse = any(word in verdict for word in ("slower", "less", "more"))
    assert bool(found.regressions) == is_worse
    assert found.notes == (["1 rows of the baseline were not run"] if verdict == "new" else [])
    compare_with(found, SuiteResult({**machine, "cores": 2}, []))
    assert "another machine" in found.notes[-1]


def test_names():
    assert set(NAMES) == {*OPS, "models"}
    with pytest.raises(BitwrightError, match="no suite is named 'matmull'"):
        bw.bench_suite(["matmull"])
    with pytest.raises(BitwrightError, match="rounds"):
        bw.bench_suite(["softmax"], rounds=0)


def test_command(tmp_path):
    b = bw.Builder("dense")
    x = b.input("x", "f32[batch, 6]")
    w = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
    model = tmp_path / "dense.onnx"
    b.build(y=b.relu(b.matmul(x, b.parameter("w", w)))).save(model)

    def call(*words):
        return CliRunner().invoke(main, ["bench", *map(str, words)])

    quick = "--quick", "--rounds", "1", "--threads", "1"
    files = "--json", tmp_path / "a.json", "--csv", tmp_path / "a.csv"
    first = call("--suite", model, "--size", "batch=5", *quick, *files)
    assert first.exit_code == 0 and "dense.onnx" in first.output, first.output
    record = json.loads((tmp_path / "a.json").read_text())
    assert [one["precision"] for one in record["rows"]] == ["f32", "bf16", "int8"]
    for one in record["rows"]:
        one["milliseconds"], one["quartiles"] = 1e-7, [1e-7, 1e-7]
    (tmp_path / "a.json").write_text(json.dumps(record))
    slower = call("--suite", model, "--size", "batch=5", *quick, "--baseline", tmp_path / "a.json")
    assert slower.exit_code == 1 and "slower" in slower.output
    for words in ((), ("--quick", model), ("--suite", "--precision", "f16"), (model, model)):
        assert call(*words).exit_code == 2
