"""The profile of steps and of a model, from given times and peaks."""

import dataclasses
from collections import Counter

import numpy as np
import pytest

import bitwright as bw
from bitwright.backends.base import Profile, TimedStep
from bitwright.backends.cpu.profile.peaks import Level, Peaks
from bitwright.errors import RunError
from bitwright.lir.buffer import Buffer, Storage, View
from bitwright.lir.schedule import KernelStep
from bitwright.report.profile import ProfileReport, profile
from bitwright.report.step_rows import step_rows
from bitwright.report.traffic import traffic

PEAKS = Peaks(1, 100e9, None, (Level("L2", 1 << 20, 50e9), Level("memory", float("inf"), 10e9)))


def ones(*shape):
    return np.ones(shape, np.float32)


def network():
    b = bw.Builder("network")
    x = b.input("x", "f32[batch, 3, 16, 16]")
    y = b.relu(b.conv(x, b.constant(ones(16, 3, 3, 3)), pads=[1, 1, 1, 1]))
    y = b.reshape(b.transpose(y, perm=[0, 2, 3, 1]), shape=[x.shape[0], 4096])
    return b.build(y=b.add(b.matmul(y, b.constant(ones(4096, 5))), b.constant(ones(5))))


def report(seconds=1e-4, overhead=0.0, barrier=1e-7, graph=None, batch=2):
    """The report of a model whose steps all took `seconds`."""
    exe = bw.compile(graph or network(), threads=1)
    steps = [TimedStep(step, seconds) for step in exe.engine.schedule.steps]
    run = len(steps) * seconds + overhead
    found = Profile(tuple(steps), run, overhead, barrier, 1, {"batch": batch})
    lowered = exe.history.stages[-1].graph
    rows = list(step_rows(lowered, found, PEAKS))
    return ProfileReport("network", {"batch": batch}, PEAKS, rows, run, overhead, barrier)


def test_operations_go_to_the_steps_that_compute():
    found = report()
    by_op = {row.op: row for row in found.steps if row.op != "copy"}
    conv, matmul = by_op["conv"], by_op["matmul"]
    outputs = 2 * 16 * 16 * 16
    assert conv.operations == 2 * outputs * 27 + outputs and conv.fused == ("relu",)
    assert matmul.operations == 2 * 2 * 4096 * 5 + 10 and matmul.fused == ("add",)
    assert matmul.rate == pytest.approx(matmul.operations / 1e-4)
    assert all(row.operations == 0 for row in found.steps if row.op == "copy")
    assert found.operations == conv.operations + matmul.operations
    assert sum(row.share for row in found.steps) == pytest.approx(1)


def test_a_model_is_compiled_and_gets_random_inputs():
    found = bw.profile(network(), rounds=1, sizes={"batch": 2}, threads=1)
    assert isinstance(found, ProfileReport) and found.sizes == {"batch": 2}
    assert {"conv", "matmul"} <= {row.op for row in found.steps} and found.verdict()


def test_integer_products_have_their_own_peak():
    b = bw.Builder("quantized")
    x, w = b.input("x", "u8[64, 256]"), b.constant(np.ones((256, 256), np.int8))
    exe = bw.compile(b.build(y=b.integer_matmul(x, w)), threads=1)
    steps = tuple(TimedStep(step, 1e-3) for step in exe.engine.schedule.steps)
    found = Profile(steps, 1e-3, 0.0, 1e-7, 1, {})
    own = dataclasses.replace(PEAKS, integers=200e9)
    for peaks, peak in ((own, 200e9), (PEAKS, 100e9)):
        rows = list(step_rows(exe.history.stages[-1].graph, found, peaks))
        row = rows[-1]  # some targets widen the operand in a step before
        assert row.integer
        assert sum(r.operations for r in rows) == pytest.approx(2 * 64 * 256 * 256)
        assert row.reached == pytest.approx(row.operations / peak / 1e-3)


def test_float_products_have_a_reason():
    b = bw.Builder("layers")
    x, scale = b.input("x", "f32[4, 64]"), b.constant(np.float32(0.02))
    zero = b.constant(np.uint8(128))
    source = b.dequantize(b.quantize(x, scale, zero, to="u8"), scale, zero)
    w = b.dequantize(b.constant(np.ones((64, 64), np.int8)), b.constant(np.float32(0.01)))
    y = b.matmul(b.tanh(b.matmul(source, w)), b.constant(ones(64, 64)), name="head")
    found = profile(bw.compile(b.build(y=y), threads=1), {"x": ones(4, 64)}, rounds=1)
    kinds = [row.arithmetic for row in found.steps if row.arithmetic]
    assert list(dict.fromkeys(kinds)) == ["integer", "float"]
    ((node, why),) = found.float_products
    assert node == "head" and "is not a dequantized value" in why
    assert 0.4 < found.integer_fractions[0] < 0.6
    assert not profile(bw.compile(network(), threads=1), {"x": ones(1, 3, 16, 16)}).float_products


def test_the_roofline_is_the_longer_of_arithmetic_and_bytes():
    conv = next(row for row in report().steps if row.op == "conv")
    arithmetic, movement = conv.operations / 100e9, conv.traffic.nbytes / 50e9
    assert arithmetic > movement and conv.limit == "compute"
    assert conv.reached == pytest.approx(arithmetic / 1e-4)
    matmul = next(row for row in report().steps if row.op == "matmul")
    assert matmul.limit == "memory"
    assert matmul.reached == pytest.approx(matmul.traffic.nbytes / 50e9 / 1e-4)


def test_the_verdict_names_the_largest_limit():
    assert report(overhead=1.0).verdict().startswith("overhead between steps: ")
    assert report(barrier=1e-4).verdict().startswith("many small steps: 100%")
    b = bw.Builder("sum")
    x = b.input("x", "f32[batch, 4096]")
    assert report(graph=b.build(y=b.add(x, x))).verdict().startswith("memory bandwidth: 100%")
    b = bw.Builder("square")
    x = b.input("x", "f32[512, 512]")
    square = b.build(y=b.matmul(x, b.constant(ones(512, 512))))
    assert report(graph=square, seconds=1e-2).verdict().startswith("compute, below the peak: 100%")
    assert report(graph=square, seconds=3e-3).verdict().startswith("compute, near the peak: 100%")


def test_totals_and_json():
    found = report(overhead=1e-2)
    facts = found.as_json()
    assert facts["step_seconds"] == pytest.approx(1e-4 * len(found.steps))
    assert facts["run_seconds"] == pytest.approx(1e-2 + facts["step_seconds"])
    assert sum(facts["shares"].values()) == pytest.approx(1)
    counted = Counter(row.kernel for row in found.steps)
    assert {name: count for name, count, _ in found.families()} == counted
    outside = sum(row.op not in ("conv", "matmul") for row in found.steps)
    assert found.outside_products == pytest.approx(outside / len(found.steps))
    assert facts["steps"][0]["traffic"].keys() == {"reads", "writes"}


def test_a_model_is_profiled_on_its_inputs():
    exe = bw.compile(network(), threads=1)
    found = profile(exe, {"x": ones(3, 3, 16, 16)}, rounds=2)
    assert found.sizes == {"batch": 3} and found.step_seconds > 0
    assert {row.limit for row in found.steps} <= {"compute", "memory", "small"}


def test_errors_of_profile():
    with pytest.raises(RunError, match="only compiled models"):
        profile(bw.compile(network(), target="reference"), {"x": ones(1, 3, 16, 16)})
    with pytest.raises(RunError, match="rounds"):
        profile(bw.compile(network(), threads=1), {"x": ones(1, 3, 16, 16)}, rounds=0)
    with pytest.raises(RunError):
        profile(bw.compile(network(), threads=1), {"x": ones(1, 2, 16, 16)})


def test_bytes_of_views():
    f32 = bw.dtype("f32")
    table, rows = Buffer("table", f32, 1000), Buffer("rows", f32, 20, Storage.OUTPUT)
    bias = Buffer("bias", f32, 5)
    pointers = {
        "x": View(table, 0, (200, 5), (5, 1)),
        "b": View(bias, 0, (4, 5), (0, 1)),
        "y": View(rows, 0, (4, 5), (5, 1)),
    }
    step = KernelStep("gather_0", "rows", pointers, {}, (table, bias), (rows,))
    assert traffic(step, {}, is_lookup=False).reads == {"table": 4000, "bias": 20}
    taken = traffic(step, {}, is_lookup=True)
    assert taken.reads == {"table": 80, "bias": 20} and taken.writes == {"rows": 80}
    assert taken.nbytes == 180
