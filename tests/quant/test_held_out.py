"""Outputs are measured on held-out batches."""

import numpy as np
import pytest

import bitwright as bw
from bitwright.errors import CalibrationError
from bitwright.quant.calibration.run import MOST_HELD_OUT, CalibrationRun, is_held_out
from bitwright.quant.data.batches import Batches
from bitwright.quant.model.points import find_points
from bitwright.warn import DataWarning


def network():
    rng = np.random.default_rng(0)
    b = bw.Builder("net")
    h = b.input("x", "f32[n, 96]")
    for i in range(3):
        h = b.relu(b.matmul(h, (rng.normal(size=(96, 96)) / 7).astype(np.float32), name=f"m{i}"))
    return b.build(y=b.matmul(h, rng.normal(size=(96, 8)).astype(np.float32), name="last"))


def batches(count, rows=8, seed=1, size=1.0):
    rng = np.random.default_rng(seed)
    return [{"x": (size * rng.normal(size=(rows, 96))).astype(np.float32)} for _ in range(count)]


def sqnr(exact, found):
    return 10 * np.log10((exact**2).sum() / ((exact - found) ** 2).sum())


def gathered(data, **options):
    graph = network()
    calibration = CalibrationRun(
        graph, find_points(graph), Batches(data, graph, **options), None, 1
    )
    calibration.run(False)
    return calibration


def test_every_8th_batch_from_the_4th_on_is_held_out():
    assert [number for number in range(1, 30) if is_held_out(number)] == [4, 12, 20, 28]


def test_held_out_batches_do_not_change_the_statistics():
    data = batches(12)
    for number in (3, 11):
        data[number]["x"] *= 1000
    calibration = gathered(data)
    assert calibration.stats["x"].every.peaks.max() < 100
    is_apart = lambda found: [batch["x"].max() > 1000 for batch in found]
    assert is_apart(calibration.held_out) == [True]
    assert is_apart(calibration.checked) == [False, False, False, False, True]
    assert calibration.batches == 12 and not is_same(
        calibration.checked[-1], calibration.held_out[0]
    )


def is_same(first, second):
    return first["x"].tobytes() == second["x"].tobytes()


@pytest.mark.parametrize("count, held_out", [(4, 1), (11, 1), (12, 1), (28, 2)])
def test_the_report_names_the_measured_batches(count, held_out):
    q = bw.quantize(network(), batches(count))
    report = q.report
    assert report.held_out_batches == held_out and report.notes == []
    assert f"outputs on {held_out} held-out batch" in report.summary()
    assert report.to_json()["held_out_batches"] == held_out
    apart = [batch for i, batch in enumerate(batches(count), 1) if is_held_out(i)]
    apart = apart[1::2] or apart  # the others helped to choose
    run = lambda model: np.concatenate([bw.compile(model).run(b)["y"] for b in apart])
    assert report.output_sqnr_db["y"] == pytest.approx(sqnr(run(network()), run(q)), abs=0.01)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_batches_are_not_held_out_and_the_report_notes_it(count):
    with pytest.warns(DataWarning, match="no batch was held out, because there were fewer than 4"):
        report = bw.quantize(network(), batches(count)).report
    assert report.held_out_batches == 0 and "no batch was held out" in str(report)
    assert "outputs on calibration data" in report.summary()


def test_accuracy_on_few_rows_is_not_overstated():
    """Rounding fits the weights to 64 rows."""
    recipe = {"base": "w4", "block": 0}
    q = bw.quantize(network(), batches(8), recipe)
    run = lambda model: np.concatenate([bw.compile(model).run(b)["y"] for b in batches(40, seed=9)])
    fresh = sqnr(run(network()), run(q))
    assert abs(q.report.output_sqnr_db["y"] - fresh) < 2


def test_memory_does_not_grow_with_the_batches():
    calibration = gathered(batches(900, rows=1))
    assert len(calibration.held_out) <= MOST_HELD_OUT // 2 and calibration.batches == 900
    firsts = [float(batch["x"][0, 0]) for batch in calibration.held_out]
    numbers = [i for i, b in enumerate(batches(900, rows=1), 1) if float(b["x"][0, 0]) in firsts]
    assert all(map(is_held_out, numbers)) and numbers[-1] > 800  # spread over all of them


def test_few_large_batches_are_kept(monkeypatch):
    monkeypatch.setattr(
        "bitwright.quant.calibration.run.BYTES_HELD_OUT", 3 * batches(1)[0]["x"].nbytes
    )
    calibration = gathered(batches(60))
    assert len(calibration.held_out) == 1 and calibration.batches == 60


def test_a_statistics_file_contains_held_out_batches(tmp_path):
    path, data = tmp_path / "seen", batches(12)
    first = bw.quantize(network(), data[:5], statistics=path).report
    again = bw.quantize(network(), statistics=path).report
    assert again.output_sqnr_db == first.output_sqnr_db and again.held_out_batches == 1
    more = bw.quantize(network(), data, statistics=path).report
    assert more.output_sqnr_db == bw.quantize(network(), data).report.output_sqnr_db
    assert more.held_out_batches == 1


def test_nan_in_a_held_out_batch_is_an_error():
    data = batches(8)
    data[3]["x"][2, 5] = np.nan
    with pytest.raises(CalibrationError, match="batch 3 of the data: the input 'x' holds NaN"):
        bw.quantize(network(), data)
