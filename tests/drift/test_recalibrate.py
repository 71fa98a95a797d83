"""recalibrate continues saved statistics, repairs drift, and names the ranges that moved."""

import json

import numpy as np
import pytest
from click.testing import CliRunner
from served_models import batches, mlp, quantized

import bitwright as bw
from bitwright.cli import main
from bitwright.errors import BitwrightError


def drifts(q, data):
    monitor = bw.compile(q, threads=1).monitor()
    for batch in data:
        monitor.observe(batch)
    return monitor.report().has_drift


def test_recalibration_repairs(tmp_path):
    file = tmp_path / "seen.npz"
    q = quantized(statistics=file)
    new, later = batches(16, seed=5, scale=3.0), batches(20, seed=6, scale=3.0)
    assert drifts(q, later)
    again = bw.recalibrate(q, file, new, threads=1)
    assert not drifts(again, later) and not drifts(again, batches(20, seed=7))
    moved = {one.name: one for one in again.moved}
    assert 1 < moved["first input"].widening < 4
    assert "first input: -" in again.changes_text() and "became" in again.changes_text()
    assert again.recipe == q.recipe and not list(tmp_path.glob(".*"))
    # the file now has old and new data: nothing moves further
    third = bw.recalibrate(mlp(), file, new, "int8-static", threads=1)
    assert not third.moved and "no range of 2 moved" in third.changes_text()


def test_statistics_equal_those_of_one_run(tmp_path):
    """Old batches, then new ones: the ranges of both together."""
    old, new = batches(8, seed=1), batches(8, seed=2, scale=2.0)
    file, whole = tmp_path / "parts.npz", tmp_path / "whole.npz"
    bw.quantize(mlp(), old, "int8-static", statistics=file, threads=1)
    bw.recalibrate(mlp(), file, new, "int8-static", threads=1)
    bw.quantize(mlp(), old + new, "int8-static", statistics=whole, threads=1)
    with np.load(file) as a, np.load(whole) as b:
        for key in ("0.ends", "1.ends"):
            np.testing.assert_array_equal(a[key][:2], b[key][:2])
        assert json.loads(bytes(a["header"]))["data"] == json.loads(bytes(b["header"]))["data"]


def test_errors_leave_the_file(tmp_path):
    file = tmp_path / "seen.npz"
    q = quantized(statistics=file)
    before = file.read_bytes()
    bad = [{"x": np.full((2, 16), np.nan, np.float32)}]
    for arguments in ((q, file, bad), (q, file, []), (q, file, None), (q.graph, file, bad)):
        with pytest.raises(BitwrightError):
            bw.recalibrate(*arguments, threads=1)
    assert file.read_bytes() == before and not list(tmp_path.glob(".*"))
    with pytest.raises(BitwrightError, match="no file"):
        bw.recalibrate(q, tmp_path / "missing.npz", batches(2, seed=0))
    file.write_bytes(before[:200])
    with pytest.raises(BitwrightError, match="damaged"):
        bw.recalibrate(q, file, batches(2, seed=0))


def test_commands(tmp_path):
    folders = {}
    for name, scale in (("old", 1.0), ("same", 1.0), ("new", 3.0)):
        folders[name] = tmp_path / name
        folders[name].mkdir()
        for number, batch in enumerate(batches(12, seed=len(name) + int(scale), scale=scale)):
            np.savez(folders[name] / f"{number:02}.npz", **batch)
    model, stats, counters = (tmp_path / n for n in ("m.onnx", "seen.npz", "counters.json"))
    mlp().save(model)
    paths = [tmp_path / name for name in ("a.onnx", "b.onnx")]

    def call(*words):
        return CliRunner().invoke(main, [*map(str, words), "--threads", "1"])

    options = "--statistics", stats, "--recipe", "int8-static"
    assert (
        call("quantize", model, "--data", folders["old"], "-o", paths[0], *options).exit_code == 0
    )
    fits = call("watch", paths[0], "--data", folders["same"], "--stats", counters)
    assert fits.exit_code == 0 and "no drift in 2 quantized tensors" in fits.output
    left = call("watch", paths[0], "--data", folders["new"], "--stats", counters, "--json")
    facts = json.loads(left.output)
    assert left.exit_code == 1 and facts["has_drift"] and facts["runs"] == 24
    assert facts["alarms"][0]["tensor"] == "first input" and facts["alarms"][0]["since"] == 13
    moved = call("recalibrate", model, "--data", folders["new"], "-o", paths[1], *options)
    assert moved.exit_code == 0 and "ranges moved" in moved.output, moved.output
    assert call("watch", paths[1], "--data", folders["new"]).exit_code == 0
    assert "nothing to watch" in call("watch", model, "--data", folders["new"]).output
    assert call("watch", paths[0], "--data", tmp_path / "none").exit_code == 2
