"""Monitors: counters are exact, drift raises alarms in words, and the same data raises none."""

import threading

import numpy as np
import pytest
from served_models import FEATURES, batches, mlp, quantized

import bitwright as bw
from bitwright.drift.sequential_tests import SequentialTests
from bitwright.errors import BitwrightError
from bitwright.warn import BitwrightWarning


@pytest.fixture(scope="module")
def static():
    return quantized()


@pytest.fixture
def exe(static):
    return bw.compile(static, threads=1)


def one_quantizer(x_type, scale, zero, to, **attrs):
    b = bw.Builder("q")
    x = b.input("x", x_type)
    q = b.quantize(x, scale, zero, to=to, **attrs)
    w = b.parameter("w", np.ones((4, 4), np.float32))
    return b.build(y=b.matmul(b.dequantize(q, scale, zero, **attrs), w, name="y"))


def expected_counts(x, scale, zero, element, axis=None):
    """Values that saturate below and above, by numpy."""
    low, high = bw.dtype(element).min, bw.dtype(element).max
    scale = scale if axis is None else scale.reshape([-1 if i == axis else 1 for i in range(2)])
    steps = np.rint((x.astype(np.float32) / scale).astype(np.float32)) + float(zero.reshape(-1)[0])
    return int((steps < low).sum()), int((steps > high).sum())


@pytest.mark.parametrize("target", ["cpu", "reference"])
@pytest.mark.parametrize(
    ("scale", "zero", "to"), [(0.0173, 128, "u8"), (0.02, -7, "i8"), (0.31, 3, "u4")]
)
def test_counts_equal_numpys(scale, zero, to, target):
    kind = np.int8 if to == "i8" else np.uint8
    scale, zero = np.float32(scale), np.array(zero, kind).astype(bw.dtype(to).numpy)
    graph = one_quantizer("f32[n, 4]", scale, zero, to)
    exe = bw.compile(graph, threads=1, target=target)
    rng = np.random.default_rng(0)
    total = np.zeros(2, int)
    with exe.monitor(every=1) as monitor:
        for rows in (1, 7, 5000):
            x = (2 * rng.normal(size=(rows, 4))).astype(np.float32)
            steps = rng.integers(-3, 300, x.size // 2) + np.float32(0.5)  # halves decide
            x.reshape(-1)[: len(steps)] = (steps - float(zero)) * scale
            exe.run({"x": x})
            total += expected_counts(x, scale, zero.astype(np.float32), to)
    (row,) = monitor.report().rows
    assert (row.below, row.above) == tuple(total)
    assert row.values == 4 * 5008 and min(total) > 0


def test_a_scale_per_channel():
    scale = np.array([0.01, 0.02, 0.04, 0.013], np.float32)
    graph = one_quantizer("f32[n, 4]", scale, np.full(4, 128, np.uint8), "u8", axis=1)
    x = (2 * np.random.default_rng(0).normal(size=(900, 4))).astype(np.float32)
    monitor = bw.compile(graph, threads=1).monitor()
    monitor.observe({"x": x})
    (row,) = monitor.report().rows
    assert (row.below, row.above) == expected_counts(x, scale, np.array([128.0]), "u8", 1)


def test_half_floats_and_missing_numbers():
    scale, zero = np.float32(0.01), np.uint8(128)
    b = bw.Builder("q")
    x = b.input("x", "f16[n, 4]")
    q = b.quantize(x, scale, zero, to="u8")
    exe = bw.compile(b.build(y=b.dequantize(q, scale, zero)), threads=1)
    monitor = exe.monitor()
    values = np.array([[np.nan, np.inf, -np.inf, 0.5]], np.float16)
    monitor.observe({"x": values})
    (row,) = monitor.report().rows
    assert (row.nan, row.below, row.above, row.values) == (1, 1, 1, 3)
    assert "1 value NaN" in str(monitor.report())


def test_a_range_from_zero_may_stand_for_a_relu():
    """Other tools drop the relu before a quantizer whose range begins at 0."""
    graph = one_quantizer("f32[n, 4]", np.float32(0.01), np.uint8(0), "u8")
    monitor = bw.compile(graph, threads=1).monitor()
    monitor.observe({"x": np.array([[-9, -1, 1, 9]], np.float32)})
    (row,) = monitor.report().rows
    assert (row.below, row.above) == (0, 1)


def test_shifted_data_raises_an_alarm_that_names_the_tensor(exe):
    heard = []
    with exe.monitor(every=1, on_alarm=heard.append) as monitor:
        for batch in batches(40, seed=2):
            exe.run(batch)
        assert not monitor.alarms and not monitor.report().has_drift
        for batch in batches(10, seed=3, scale=3.0):
            exe.run(batch)
    first = monitor.alarms[0]
    assert first.tensor == "first input" and first.kind == "clipped"
    assert 38 <= first.since <= 42 < first.run
    assert first.fraction > 0.02 and first.expected < 0.001
    assert "of values clipped" in first.message and "since run 41" in first.message
    assert "data has left the calibrated range" in first.message
    assert [alarm.tensor for alarm in heard] == [alarm.tensor for alarm in monitor.alarms]
    assert "alarm: first input" in str(monitor.report())


def test_a_range_that_is_hardly_used(exe):
    monitor = exe.monitor(every=1)
    for batch in batches(250, seed=4, scale=0.1, rows=4):
        monitor.observe(batch)
    found = {alarm.tensor: alarm for alarm in monitor.alarms}
    assert found["first input"].kind == "unused"
    assert 0.01 < found["first input"].fraction < 0.15
    assert "range is used to" in found["first input"].message


def test_the_same_distribution_raises_no_alarm(exe):
    """30 repetitions; their false-alarm rate is at most 0.01 each."""
    monitor = exe.monitor(every=1)
    alarms = 0
    for seed in range(30):
        monitor.reset()
        for batch in batches(40, seed=100 + seed, rows=1 + seed):
            monitor.observe(batch)
        alarms += monitor.report().has_drift
    assert alarms == 0


def test_ranges_of_few_batches():
    """Later data of the same kind exceeds a range from four small batches, which is no drift."""
    exceeded = 0
    for seed in range(6):
        q = bw.quantize(mlp(), batches(4, seed, rows=4), "int8-static", threads=1)
        monitor = bw.compile(q, threads=1).monitor()
        for batch in batches(150, seed=50 + seed, rows=4):
            monitor.observe(batch)
        assert not monitor.alarms
        exceeded += any(row.outside > 0.002 for row in monitor.report().rows)
    assert exceeded


@pytest.mark.parametrize("is_upper", [True, False])
@pytest.mark.parametrize("spread", ["rare", "even"])
def test_false_alarm_rate_of_the_test(is_upper, spread):
    """2,000 repetitions of 400 runs whose mean is exactly the bound."""
    level, repetitions, mean = 0.05, 2000, 0.02
    rng = np.random.default_rng(0)
    wealths = SequentialTests([mean] * repetitions, [is_upper] * repetitions)
    raised = np.zeros(repetitions, bool)
    for _ in range(400):
        if spread == "rare":
            fractions = (rng.random(repetitions) < mean).astype(float)
        else:
            fractions = rng.uniform(0, 2 * mean, repetitions)
        wealths.update(fractions, np.ones(repetitions, bool))
        raised |= wealths.wealth >= 1 / level
    assert raised.mean() <= level


def test_a_dynamic_range_clips_nothing():
    exe = bw.compile(quantized("int8-dynamic"), threads=1)
    with exe.monitor(every=1) as monitor:
        for batch in batches(30, seed=2):
            exe.run(batch)
        assert not monitor.alarms
        for batch in batches(10, seed=3, scale=4.0):
            exe.run(batch)
    assert {alarm.kind for alarm in monitor.alarms} == {"outside"}
    assert "the range is dynamic, so nothing is clipped" in monitor.alarms[0].message
    assert "clip nothing" in str(monitor.report())


@pytest.mark.parametrize("make", [mlp, lambda: quantized("w8")])
def test_nothing_to_watch(make):
    exe = bw.compile(make(), threads=1)
    with exe.monitor() as monitor:
        exe.run(batches(1, seed=0)[0])
    assert not monitor.tensors and monitor.runs == 1 and not monitor.observed
    assert str(monitor.report()).startswith("nothing to watch: no activation")


def test_sampling(exe):
    (batch,) = batches(1, seed=0)

    def observed(count, **options):
        with exe.monitor(**options) as monitor:
            found = []
            for _ in range(count):
                exe.run(batch)
                found.append(monitor.observed)
        return found

    assert observed(7, every=3) == [1, 1, 1, 2, 2, 2, 3]
    drawn = observed(60, fraction=0.2, seed=5)
    assert drawn == observed(60, fraction=0.2, seed=5) and 3 < drawn[-1] < 30
    assert drawn != observed(60, fraction=0.2, seed=6)
    by_budget = observed(300, budget=0.01)
    assert 5 <= by_budget[-1] < 100


def test_results_do_not_change(exe):
    (batch,) = batches(1, seed=0)
    before = exe.run(batch)["y"]
    with exe.monitor(every=1):
        np.testing.assert_array_equal(exe.run(batch)["y"], before)
        out = np.empty_like(before)
        assert exe.run(batch, out={"y": out})["y"] is out
    np.testing.assert_array_equal(out, before)


def test_counters_in_a_file(exe, tmp_path):
    first, second = batches(5, seed=2), batches(5, seed=3, scale=3.0)
    path = tmp_path / "counters.json"
    with exe.monitor(every=1) as whole:
        for batch in first + second:
            exe.run(batch)
    with exe.monitor(every=1) as part:
        for batch in first:
            exe.run(batch)
    part.save(path)
    with exe.monitor(every=1, load=path) as rest:
        assert rest.runs == 5
        for batch in second:
            exe.run(batch)
    assert rest.report().to_json() == whole.report().to_json() and whole.alarms
    rest.reset()
    assert rest.runs == rest.observed == 0 and not rest.alarms
    path.write_text("{}")
    with pytest.raises(BitwrightError, match="damaged"):
        rest.load(path)
    bw.compile(quantized("int8-dynamic"), threads=1).monitor().save(path)
    with pytest.raises(BitwrightError, match="another model"):
        rest.load(path)


def test_threads(exe):
    """No run is lost, and copies of an executable share the monitor."""
    (batch,) = batches(1, seed=0, rows=3)
    with exe.monitor(every=1) as monitor:
        from copy import copy

        twins = [exe, copy(exe), copy(exe)]
        workers = [
            threading.Thread(target=lambda e=e: [e.run(batch) for _ in range(20)]) for e in twins
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert monitor.runs == monitor.observed == 60
    assert all(row.values == 60 * 3 * FEATURES for row in monitor.report().rows)
    twins[1].run(batch)
    assert monitor.observed == 60  # closed


def test_a_cached_model_with_symbolic_sizes(static, tmp_path, monkeypatch):
    monkeypatch.setenv("BITWRIGHT_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "q.onnx"
    static.save(path)
    for _ in range(2):
        exe = bw.compile(path, threads=1)
        with exe.monitor(every=1) as monitor:
            for rows in (1, 5, 2):
                exe.run(batches(1, seed=0, rows=rows)[0])
        assert monitor.tensors == ["first input", "last input"]
        assert all(row.expected is not None for row in monitor.report().rows)
        assert monitor.report().rows[0].values == 8 * FEATURES


@pytest.mark.parametrize("target", ["cpu", "reference"])
def test_state(target):
    """The counters of a run see the state that the run began with, and do not change it."""
    b = bw.Builder("sum")
    x = b.input("x", "f32[4]")
    total = b.state("total", np.zeros(4, np.float32))
    added = b.add(total, x)
    scale, zero = np.float32(1), np.uint8(0)
    y = b.dequantize(b.quantize(added, scale, zero, to="u8"), scale, zero)
    b.update(total, added)
    exe = bw.compile(b.build(y=y), threads=1, target=target)
    with exe.monitor(every=2) as monitor:
        for _ in range(5):
            result = exe.run({"x": np.full(4, 100, np.float32)})["y"]
    assert (result == 255).all()
    (row,) = monitor.report().rows
    assert (row.minimum, row.maximum, row.above) == (100, 500, 8)  # runs 1, 3 and 5


def body_with_a_quantizer(name, steps, depth=0):
    inner = bw.Builder(name)
    flag, x = inner.input("flag", "bool[]"), inner.input("x", "f32[4]")
    scale, zero = np.float32(1), np.uint8(0)
    q = inner.quantize(inner.mul(x, steps), scale, zero, to="u8", name="inside")
    y = inner.dequantize(q, scale, zero)
    if depth:
        bodies = {n: body_with_a_quantizer(n, 3.0, depth - 1) for n in ("then", "else")}
        y = inner.add(y, inner.if_(flag, flag, x, name="deeper", **bodies))
    return inner.build(y)


@pytest.mark.parametrize("target", ["cpu", "reference"])
def test_branches(target):
    """Tensors of the branch that is taken are counted, also in nested branches."""
    b = bw.Builder("model")
    flag, x = b.input("flag", "bool[]"), b.input("x", "f32[4]")
    bodies = {
        "then": body_with_a_quantizer("then", 1.0, depth=1),
        "else": body_with_a_quantizer("else", 2.0),
    }
    graph = b.build(y=b.if_(flag, flag, x, name="choice", **bodies))
    exe = bw.compile(graph, threads=1, target=target)
    with exe.monitor(every=1) as monitor:
        for number in range(5):
            exe.run({"flag": np.array(number < 3), "x": np.array([1, 50, 100, 300], np.float32)})
    rows = monitor.report().rows
    assert [row.values for row in rows] == [12, 12, 0, 8]
    assert [row.above for row in rows] == [3, 6, 0, 2]  # 300; 150, 300 of 3 x; 300 of 2 x
    assert rows[2].verdict == "no data" and not monitor.unwatched


def test_loop_bodies_are_named_as_not_watched():
    inner = bw.Builder("body")
    _, keep, x = inner.input("i", "i64[]"), inner.input("go", "bool[]"), inner.input("x", "f32[4]")
    scale, zero = np.float32(1), np.uint8(0)
    q = inner.quantize(x, scale, zero, to="u8", name="inside")
    body = inner.build(keep, inner.dequantize(q, scale, zero))
    b = bw.Builder("model")
    x = b.input("x", "f32[4]")
    y = b.loop(b.constant(np.int64(3)), b.constant(np.bool_(True)), x, body=body, carried=1)
    monitor = bw.compile(b.build(y=y), threads=1).monitor()
    assert not monitor.tensors
    assert "body of a loop" in str(monitor.report())


def test_a_failing_callback_does_not_stop_the_model(exe):
    def fails(alarm):
        raise ValueError("no network")

    with exe.monitor(every=1, on_alarm=fails), pytest.warns(BitwrightWarning, match="no network"):
        for batch in batches(5, seed=3, scale=5.0):
            exe.run(batch)


def test_bad_options(exe):
    for options in (
        {"every": 0},
        {"every": 2, "fraction": 0.1},
        {"fraction": 1.5},
        {"level": 0},
        {"budget": 0},
        {"tolerance": 2},
    ):
        with pytest.raises(BitwrightError):
            exe.monitor(**options)
    with exe.monitor(), pytest.raises(BitwrightError, match="already has a monitor"):
        exe.monitor()
