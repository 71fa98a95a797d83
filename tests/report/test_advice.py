"""Advice for models: rows, reasons and choices; models of many kinds. Never times."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

import bitwright as bw
from bitwright.cli import main
from bitwright.errors import BitwrightError
from bitwright.machine.facts import Acceleration
from bitwright.machine.timing import Timing
from bitwright.report import advice


def draw(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def network(first="batch"):
    b = bw.Builder("network")
    h = b.relu(b.matmul(b.input("x", f"f32[{first}, 24]"), b.constant(draw(24, 40))))
    return b.build(y=b.matmul(h, b.constant(draw(40, 8))), top=b.reduce_max(h, axes=[1]))


@pytest.fixture
def timed(monkeypatch):
    """Times by precision, threads and batch instead of real ones; returns the figures."""
    figures = {"int8": 1.0, "bf16": 2.0, "f32": 4.0}
    state = {"threads": 1, "batch": 1}

    def time_sides(sides, seconds):
        for run in sides.values():
            run()
        scale = state["batch"] ** 0.5 / state["threads"]
        return {name: Timing((figures[name] * scale * 1e-3,) * 3) for name in sides}

    group = advice._Study._measure_group

    def measured(self, threads, batch, seconds):
        state.update(threads=threads, batch=batch or 1)
        return group(self, threads, batch, seconds)

    monkeypatch.setattr(advice, "time_sides", time_sides)
    monkeypatch.setattr(advice._Study, "_measure_group", measured)
    return figures


def with_bf16(monkeypatch, is_there):
    found = Acceleration("bf16", is_there, "", "", "", "no such instruction")

    class Machine:
        def accelerated(self, dtype):
            return found

    monkeypatch.setattr(advice, "hardware", lambda measure: Machine())


def test_the_fastest_that_is_accurate_with_reasons(timed, monkeypatch):
    with_bf16(monkeypatch, True)
    data = [{"x": draw(4, 24, seed=n)} for n in range(4)]
    found = bw.advise(network(), data, threads=(1, 2), batches=(1, 4))
    assert (found.precision, found.threads, found.batch) == ("int8", 2, 4)
    assert {(r.precision, r.threads, r.batch) for r in found.rows} == {
        (p, t, n) for p in ("f32", "int8", "bf16") for t in (1, 2) for n in (1, 4)
    }
    assert found.milliseconds == pytest.approx(1.0) and found.memory_bytes > 0
    assert found.sqnr_db["int8"] > 20 and found.sqnr_db["bf16"] > 30
    text = str(found)
    assert "int8: 4.00 times f32 at 2 threads, outputs have an SQNR of" in text
    assert "on held-out data" in text
    assert "2 threads are 2.00 times as fast as 1" in text and "advice: int8, 2 threads" in text
    exact = bw.advise(network(), data, threads=(1,), batches=(4,), min_sqnr_db=1e3)
    one = bw.advise(network(), data[:1], threads=(1,), batches=(4,))
    assert "on calibration data" in str(one)
    assert exact.precision == "f32" and "under the 1000.0 dB required" in str(exact)


def test_without_data_int8_is_a_stand_in(timed, monkeypatch):
    with_bf16(monkeypatch, False)
    found = bw.advise(network(), threads=(1,), batches=(1,))
    assert "for timing only: its accuracy is unknown without data" in str(found)
    assert "bf16 is not accelerated here: no such instruction" in str(found)
    assert found.sqnr_db == {} and found.measured_on == "random inputs"
    assert json.loads(json.dumps(found.as_json()))["precision"] == "int8"


def test_a_slower_precision_is_not_advised(timed, monkeypatch):
    with_bf16(monkeypatch, True)
    timed.update(int8=5.0, bf16=3.95)
    assert bw.advise(network("3"), threads=(1,)).precision == "f32"


def test_a_fixed_batch(timed):
    found = bw.advise(network("3"), threads=(1,))
    assert found.batch_name == "" and found.batch == 3 and "batch: fixed by the model" in str(found)


def test_a_quantization_beyond_the_budget_is_replaced_by_a_quick_one(timed, monkeypatch):
    monkeypatch.setattr(advice, "_QUANTIZE_SHARE", -1.0)
    data = [{"x": draw(2, 24, seed=n)} for n in range(4)]
    found = bw.advise(network(), data, threads=(1,), batches=(1,), budget=60)
    assert "weights are rounded to nearest" in str(found)
    assert found.precision == "int8" and found.sqnr_db["int8"] > 20


def test_the_budget_leaves_things_out(timed):
    timed.update(f32=1e5, int8=1e5, bf16=1e5)
    found = bw.advise(network(), threads=(1,), batches=(1, 4), budget=5)
    assert {row.batch for row in found.rows} == {1}
    assert "the budget was used up: not every number" in str(found)
    found = bw.advise(network(), threads=(1,), batches=(1,), budget=1e-9)
    assert {row.precision for row in found.rows} == {"f32"}
    assert "int8 was not measured: the budget was used up" in str(found)


def lookup():
    """Integer inputs and a length that is not a batch."""
    b = bw.Builder("lookup")
    rows = b.gather(b.constant(draw(5, 8)), b.input("ids", "i64[batch, seq]"), axis=0)
    return b.build(y=b.matmul(rows, b.constant(draw(8, 6))))


def counter():
    """State, and nothing to quantize."""
    b = bw.Builder("counter")
    total = b.state("total", np.zeros(3, np.float32))
    after = b.add(total, b.input("x", "f32[3]"))
    b.update(total, after)
    return b.build(y=b.mul(after, 2.0))


def scaled():
    """A size that is computed from the batch."""
    b = bw.Builder("scaled")
    return b.build(y=b.relu(b.input("x", "f32[n, 2]")), z=b.relu(b.input("two", "f32[2*n, 2]")))


def no_inputs():
    b = bw.Builder("constant")
    return b.build(y=b.relu(b.constant(draw(3))))


@pytest.mark.parametrize("make", [lookup, counter, scaled, no_inputs])
def test_models_of_other_kinds(timed, make):
    found = bw.advise(make(), threads=(1, 2), batches=(1, 2))
    assert found.rows and found.precision in ("f32", "int8", "bf16")
    assert found.batch_name == ("batch" if make is lookup else "")
    if make is lookup:
        assert "measured at seq=1" in str(found)
    if make is counter:
        assert "no layer" in str(found) or "int8 was not measured" in str(found)


def test_a_quantized_model_is_not_quantized_again(timed):
    data = [{"x": draw(4, 24, seed=n)} for n in range(4)]
    found = bw.advise(bw.quantize(network(), data, progress=False).graph, threads=(1,))
    assert "quantized already" in str(found)
    assert "int8" not in {row.precision for row in found.rows}


def test_sizes_that_the_model_does_not_accept():
    b = bw.Builder("pool")
    graph = b.build(y=b.avg_pool(b.input("x", "f32[1, 2, n, n]"), kernel=[3, 3]))
    with pytest.raises(BitwrightError, match=r"random inputs: .*Give data, or sizes"):
        bw.advise(graph, threads=(1,))
    assert bw.advise(graph, sizes={"n": 5}, threads=(1,), budget=5).rows


def test_bad_arguments():
    for options in ({"budget": 0}, {"threads": ()}, {"threads": (0,)}, {"batches": (0,)}):
        with pytest.raises(BitwrightError):
            bw.advise(network(), **options)
    with pytest.raises(BitwrightError, match="the data is empty"):
        bw.advise(network(), [])
    with pytest.raises(BitwrightError):
        bw.advise(network(), sizes={"nothing": 3})


def test_command(tmp_path):
    path = tmp_path / "network.onnx"
    network().save(path)
    np.savez(tmp_path / "data.npz", x=draw(8, 24))
    arguments = ["advise", str(path), "--threads", "1", "--budget", "20"]
    run = CliRunner().invoke(main, [*arguments, "--data", str(tmp_path / "data.npz")])
    assert run.exit_code == 0, run.output
    assert "advice: " in run.output and "samples/s" in run.output
    run = CliRunner().invoke(main, [*arguments, "--json", "--size", "batch=2"])
    assert json.loads(run.output)["sizes"] == {"batch": 2}
    run = CliRunner().invoke(main, ["advise", str(tmp_path / "absent.onnx")])
    assert run.exit_code == 2
