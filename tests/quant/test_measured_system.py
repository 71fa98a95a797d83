"""What QuantizationSystem measures: block sizes, recommendations, searches, benchmarks."""

import json

import numpy as np
import pytest

import bitwright as bw
from bitwright.errors import QuantizationError
from bitwright.quant.tensor import benchmark, workload
from bitwright.quant.tensor.auto_tune import TuneLimits


@pytest.fixture
def system(monkeypatch):
    monkeypatch.setattr(workload, "_SECONDS", 0.01)
    return bw.QuantizationSystem("cpu")


def weights(rows=64, columns=48):
    return np.random.default_rng(0).standard_t(4, size=(rows, columns)).astype(np.float32)


def test_acceleration_is_that_of_the_hardware(system):
    assert system.has_acceleration("int8") is system.hardware.accelerated("int8").accelerated
    assert system.has_acceleration("int4") is False


def test_block_sizes(system, monkeypatch):
    monkeypatch.setattr("bitwright.machine.preferences._SECONDS", 0.01)
    assert system.optimal_block_size("int4", (64, 32)) in (32, 64)
    assert system.optimal_block_size("int4", (20, 32)) == 20
    x = np.repeat(np.geomspace(1e-3, 1, 4), 32)[:, None] * weights(128, 8)
    assert system.optimal_block_size("int4", x=x, min_sqnr_db=1e3) == 32
    with pytest.raises(QuantizationError, match="no blocks; expected int4"):
        system.optimal_block_size("int16")
    with pytest.raises(QuantizationError, match="weights have two axes"):
        system.optimal_block_size("int4", (3,))


def test_a_recommendation_has_a_measured_reason_for_each_part(system):
    work = bw.Workload("matmul", ((8, 64), (64, 32)), ("f32", "int8", "w4"), min_sqnr_db=25)
    found = system.recommend(work)
    assert [one.precision for one in found.candidates] == ["f32", "int8", "w4"]
    assert [part.name for part in found.parts] == ["weights", "activations", "sums", "output"]
    assert found.precision in ("f32", "int8") and found.is_met
    assert found.measured_on == "random values" and "SQNR" in str(found)
    plain, int8, w4 = found.candidates
    assert plain.sqnr_db == np.inf and int8.sqnr_db > 25 > w4.sqnr_db
    assert w4.unmet == (f"{w4.sqnr_db:.1f} dB is under 25.0 dB",)
    assert w4.nbytes < plain.nbytes


def test_requirements_that_cannot_be_met(system):
    x = np.random.default_rng(1).normal(size=(2, 3, 8, 8)).astype(np.float32)
    work = bw.Workload(
        "conv2d", (x.shape, (4, 3, 3, 3)), ("int8",), max_bytes=1, max_seconds=0.0, data=[x, x],
        attributes={"pads": (1, 1, 1, 1)},
    )  # fmt: skip
    found = system.recommend(work)
    assert not found.is_met and found.precision == "int8" and "no precision meets" in str(found)
    assert found.measured_on == "2 given samples" and len(found.candidates[1].unmet) == 2


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("sort", ((1, 2), (2, 3))), "unknown operation"),
        (("matmul", ((1, 2), (3, 3))), "the shapes do not fit"),
        (("matmul", ((1, 2), (2,))), "two shapes of rank 2"),
        (("matmul", ((0, 2), (2, 3))), "less than 1"),
        (("matmul", ((1, 2), (2, 3)), ("int5",)), "unknown precision"),
    ],
)
def test_bad_workloads(arguments, message):
    with pytest.raises(QuantizationError, match=message):
        bw.Workload(*arguments)


def test_data_of_another_shape(system):
    with pytest.raises(QuantizationError, match="data and shape differ"):
        system.recommend(bw.Workload("matmul", ((1, 2), (2, 3)), data=[np.ones((2, 2))]))


def test_a_search_takes_the_smallest_that_is_accurate_enough(system):
    x = weights()
    found = system.auto_tune(x, TuneLimits(min_sqnr_db=15))
    assert found.stopped == "accuracy" and found.best.quality.sqnr >= 15
    assert all(trial.quality.sqnr < 15 for trial in found.trials[:-1])
    assert found.best.nbytes < x.nbytes and found.parameters is found.best.parameters
    again = system.quantize(x, found.parameters)
    assert system.measure(x, again) == found.best.quality and "trials" in str(found)


def test_limits_are_honoured(system):
    x = weights()
    assert len(system.auto_tune(x, TuneLimits(iterations=3)).trials) == 3
    found = system.auto_tune(x, TuneLimits(seconds=0))
    assert found.stopped == "time" and len(found.trials) == 1
    small = system.auto_tune(x, TuneLimits(max_bytes=1600))
    assert small.stopped == "all candidates"
    assert all(trial.nbytes <= 1600 for trial in small.trials)
    assert small.best.quality.sqnr == max(t.quality.sqnr for t in small.trials)
    with pytest.raises(QuantizationError, match="no candidate is small enough"):
        system.auto_tune(x, TuneLimits(max_bytes=1))
    with pytest.raises(QuantizationError, match="there is no data"):
        system.auto_tune([])
    with pytest.raises(QuantizationError, match="limits of a search are too low"):
        TuneLimits(iterations=0)


def test_samples_are_measured_on_the_last(system):
    x = weights()
    found = system.auto_tune([x, 2 * x, 0.5 * x], TuneLimits(min_sqnr_db=20))
    tensor = system.quantize(0.5 * x, found.parameters)
    assert system.measure(0.5 * x, tensor) == found.best.quality
    assert system.auto_tune(x[0], TuneLimits(iterations=2)).best.nbytes > 0


def test_a_benchmark_is_saved_and_compared(system, tmp_path):
    found = system.benchmark(shape=(4, 32, 16), dtypes=("uint8", "int4"), seconds=0.01)
    assert [row.operation for row in found].count("matmul") == 3 == len(found) - 4
    matmul = {row.dtype: row for row in found if row.operation == "matmul"}
    assert matmul["uint8"].sqnr_db > matmul["int4"].sqnr_db and matmul["int4"].times_f32 > 0
    assert matmul["f32"].nbytes == 4 * (4 * 32 + 32 * 16) and "times f32" in str(found)
    found.save(tmp_path / "now.json")
    found.save(tmp_path / "now.csv")
    assert (tmp_path / "now.csv").read_text().count("\n") == 8
    assert json.loads((tmp_path / "now.json").read_text())["shape"] == [4, 32, 16]
    assert (
        set(found.compare(tmp_path / "now.json").values())
        == {1.0}
        == {*found.compare(found).values()}
    )
    (tmp_path / "bad.json").write_text('{"rows": 3}')
    with pytest.raises(QuantizationError, match="not a saved benchmark"):
        found.compare(tmp_path / "bad.json")
    with pytest.raises(QuantizationError, match="unknown kind of file"):
        found.save(tmp_path / "now.txt")
    with pytest.raises(QuantizationError, match="nothing to time"):
        benchmark.run_benchmark(1, dtypes=())
