"""Taps of the compiled model against the interpreter, and their statistics."""

import gc
import os
import signal
import tracemalloc

import numpy as np
import pytest
from small_models import (
    Interrupted,
    batches,
    branches,
    convolution,
    counter,
    perceptron,
    raises,
)

import bitwright as bw
from bitwright.errors import BitwrightError, CalibrationError, GraphError
from bitwright.quant import Calibrator, IntermediateOutputs, Ranges, Statistics


def observed(graph, feeds, names):
    """The interpreter's results for these values."""
    found = {}
    bw.compile(graph, target="reference").run(
        feeds, observe=lambda value, array: found.setdefault(value.name, array)
    )
    return {name: found[name] for name in names}


@pytest.mark.parametrize("budget", [None, 0, 500])
@pytest.mark.parametrize("simplify", [True, False])
def test_taps_match_the_interpreter(budget, simplify):
    graph, names = perceptron(), ["y", "x", "m", "h", "t"]
    taps = IntermediateOutputs(graph, names, budget=budget, simplify=simplify)
    for feeds in batches(4):
        found = {name: array.copy() for name, array in taps.run(feeds)}
        assert set(found) == set(names)
        for name, expected in observed(graph, feeds, names).items():
            np.testing.assert_allclose(found[name], expected, rtol=1e-5, atol=1e-6)
    assert taps.passes == (1 if budget is None else 4 if budget == 0 else taps.passes)


def test_a_tap_behind_which_passes_would_fold():
    graph = convolution()
    feeds = {"x": np.random.default_rng(1).normal(size=(2, 3, 9, 9)).astype(np.float32)}
    names = ["c", "bn", "w"]
    found = {name: array.copy() for name, array in IntermediateOutputs(graph, names).run(feeds)}
    reference = {}
    from bitwright.ops.core.interpret import run

    run(graph, feeds, observe=lambda value, array: reference.setdefault(value.name, array))
    for name in names:
        np.testing.assert_allclose(found[name], reference[name], rtol=1e-4, atol=1e-4)


def test_statistics_cover_all_batches():
    graph, data = perceptron(), batches(7)
    calibrator = Calibrator(graph, ["h", "y"])
    whole = {"h": Statistics(), "y": Statistics()}
    for feeds in data:
        calibrator.step(feeds)
        for name, array in IntermediateOutputs(graph, ["h", "y"]).run(feeds):
            whole[name].add(array)
    for name, expected in whole.items():
        found = calibrator.ranges[name]
        assert (found.count, found.minimum) == (expected.count, expected.minimum)
        np.testing.assert_array_equal(found.counts, expected.counts)
    assert calibrator.ranges.batches == 7


def test_merge_of_split_runs_equals_one_run(tmp_path):
    data = batches(9)
    one, first, second = (Calibrator(perceptron(), ["m", "h", "y"]) for _ in range(3))
    for feeds in data:
        one.step(feeds)
    for feeds in data[:4]:
        first.step(feeds)
    for feeds in data[4:]:
        second.step(feeds)
    second.save(tmp_path / "second")
    first.merge(Calibrator(perceptron(), ["m", "h", "y"]).load(tmp_path / "second"))
    assert first.ranges.batches == 9
    for name, expected in one.ranges.items():
        found = first.ranges[name]
        for field in ("count", "minimum", "maximum", "counts", "exponent"):
            np.testing.assert_array_equal(getattr(found, field), getattr(expected, field))
        np.testing.assert_allclose(found.total, expected.total, rtol=1e-12)
        np.testing.assert_allclose(found.total_squares, expected.total_squares, rtol=1e-12)


def test_memory_does_not_grow_with_the_batches():
    calibrator = Calibrator(perceptron(), ["m", "h", "y"])
    data = batches(6)
    sizes = []
    tracemalloc.start()
    for count in (160, 960):  # by the first, Python's own lists of free objects are full
        while calibrator.ranges.batches < count:
            calibrator.step(data[calibrator.ranges.batches % len(data)])
        gc.collect()
        sizes.append((tracemalloc.get_traced_memory()[0], calibrator.ranges.nbytes))
    tracemalloc.stop()
    (few, held), (many, still_held) = sizes
    assert still_held == held
    assert many < few + 100_000  # of 800 batches, whose values alone take 480 bytes each


@pytest.mark.parametrize("element", ["f16", "bf16", "f64"])
def test_taps_are_read_at_their_own_type(element):
    graph = perceptron(element)
    calibrator = Calibrator(graph, ["x", "h"])
    feeds = batches(1, element=element)[0]
    calibrator.step(feeds)
    assert all(v.dtype == bw.dtype(element).numpy for v in calibrator.values().values())
    assert calibrator.max_abs()[0] == np.abs(feeds["x"].astype(np.float64)).max()


def test_integer_and_boolean_taps():
    b = bw.Builder("numbers")
    x = b.input("x", "i32[n]")
    s = b.add(x, x, name="s")
    graph = b.build(s, b.gt(s, 0, name="g"))
    calibrator = Calibrator(graph, ["x", "s", "g"])
    calibrator.step({"x": np.array([-7, 3, 1 << 29], np.int32)})
    assert list(calibrator.max_abs()) == [1 << 29, 1 << 30, 1]


def test_scales_are_small_but_normal():
    b = bw.Builder("small")
    x = b.input("x", "f32[2]")
    graph = b.build(b.mul(x, 1e-30, name="tiny"), b.mul(x, 0.0, name="zero"))
    calibrator = Calibrator(graph, ["x", "tiny", "zero"])
    calibrator.step({"x": np.array([1e-6, -2e-6], np.float32)})
    np.testing.assert_allclose(calibrator.scales(), [2e-6 / 127, 2e-36 / 127, 1], rtol=1e-6)
    calibrator.reset()
    calibrator.step({"x": np.array([1e-7, 0], np.float32)})
    assert list(calibrator.scales()[1:]) == [1, 1]
    notes = "\n".join(calibrator.report())
    assert "tiny: scale" in notes and "zero: all values are zero" in notes


def test_per_channel_statistics():
    calibrator = Calibrator(perceptron(), ["h", "y"], axes={"h": -1})
    data = batches(3)
    values = []
    for feeds in data:
        calibrator.step(feeds)
        values.append(calibrator.values()["h"])
    expected = np.abs(np.concatenate(values)).max(0)
    np.testing.assert_array_equal(calibrator.ranges["h"].max_abs, expected)


def test_an_infinity_raises_and_names_tap_and_batch():
    calibrator = Calibrator(perceptron(), ["x", "m"])
    calibrator.step(batches(1)[0])
    bad = np.zeros((2, 8), np.float32)
    bad[0, 0] = np.inf
    with pytest.raises(CalibrationError, match=r"batch 1 of the data: tap 'x' has 1 values"):
        calibrator.step({"x": bad})


def test_infinities_can_be_skipped_and_are_reported():
    calibrator = Calibrator(perceptron(), ["x"], nonfinite="ignore")
    calibrator.step({"x": np.array([[np.nan, np.inf, -np.inf, 3, 0, 0, 0, -2]], np.float32)})
    assert list(calibrator.max_abs()) == [3]
    assert calibrator.report() == ["x: 1 NaN and 2 infinities skipped", *calibrator.report()[1:]]


def test_taps_in_branches_count_when_they_are_reached():
    names = ["choice/then/r", "minus", "y"]
    calibrator = Calibrator(branches(), names)
    x = np.array([1, -5, 3], np.float32)
    calibrator.step({"flag": np.array(True), "x": x})
    assert list(calibrator.max_abs()) == [6, 0, 7]
    assert list(calibrator.scales()) == [6 / 127, 1, 7 / 127]
    assert "minus: the data never reached it" in calibrator.report()
    calibrator.step({"flag": np.array(False), "x": x})
    assert list(calibrator.max_abs()) == [6, 5, 7]
    assert calibrator.values()["minus"].tolist() == [-1, 5, -3]


def test_a_loop_counts_each_iteration():
    body = bw.Builder("body")
    _, go, h = body.input("i", "i64[]"), body.input("go", "bool[]"), body.input("h", "f32[2]")
    body.output("go_on", go)
    body.output("h_out", body.mul(h, 2.0, name="double"))
    b = bw.Builder("loop")
    x = b.input("x", "f32[2]")
    trips, go = b.constant(np.int64(4)), b.constant(np.array(True))
    y = b.loop(trips, go, x, body=body.build(), carried=1, name="y")
    calibrator = Calibrator(b.build(y), ["double"])
    calibrator.step({"x": np.array([1, -3], np.float32)})
    found = calibrator.ranges["double"]
    assert found.count == 8 and list(calibrator.max_abs()) == [48]


def test_state_continues_from_step_to_step():
    calibrator = Calibrator(counter(), ["after", "total"])
    for _ in range(3):
        calibrator.step({"x": np.array([1, 2], np.float32)})
    assert calibrator.values()["after"].tolist() == [3, 6]
    assert calibrator.values()["total"].tolist() == [2, 4]
    calibrator.reset()
    calibrator.step({"x": np.array([1, 2], np.float32)})
    assert calibrator.values()["after"].tolist() == [1, 2]


def test_errors_of_calibration():
    with pytest.raises(GraphError, match=r"no value 'hh'.*Did you mean 'h'"):
        Calibrator(perceptron(), ["hh"])
    for question in ("max_abs", "scales", "values"):
        with pytest.raises(CalibrationError, match="no batch has been run"):
            getattr(Calibrator(perceptron(), ["h"]), question)()
    with pytest.raises(CalibrationError, match="nonfinite"):
        Calibrator(perceptron(), ["h"], nonfinite="maybe")
    with pytest.raises(CalibrationError, match="is not a tap"):
        Calibrator(perceptron(), ["h"], axes={"m": 0})
    with pytest.raises(CalibrationError, match="axis 2 of tap 'h'"):
        Calibrator(perceptron(), ["h"], axes={"h": 2})
    with pytest.raises(CalibrationError, match="different values"):
        Calibrator(perceptron(), ["h"]).merge(Calibrator(perceptron(), ["m"]))


# bw.calibrate


def test_stored_floating_values_are_observed_and_moved_data_is_shared():
    ranges = bw.calibrate(perceptron(), batches(3))
    assert set(ranges.statistics) == {"x", "h", "y"}
    assert set(bw.calibrate(perceptron(), batches(3), values="all")) == {"x", "m", "h", "t", "y"}
    assert ranges["t"] is ranges["h"] and "t" in ranges and ranges.batches == 3
    assert all(row["count"] == 72 for row in ranges.rows())


def test_values_can_be_chosen_on_the_graph_as_it_was_written():
    x = np.random.default_rng(0).normal(size=(1, 3, 9, 9)).astype(np.float32)
    assert list(bw.calibrate(convolution(), [x], values=["c", "bn"])) == ["c", "bn"]
    assert set(bw.calibrate(convolution(), [x], values="all")) == {"x", "bn", "y"}
    with pytest.raises(CalibrationError, match="values is not a list"):
        bw.calibrate(convolution(), [x], values="c")


def test_masks_are_not_observed():
    b = bw.Builder("masked")
    x, keep = b.input("x", "f32[n, 4]"), b.input("keep", "bool[n, 4]")
    bias = b.where(keep, b.constant(np.float32(0)), b.constant(np.float32(-np.inf)), name="bias")
    y = b.softmax(b.add(x, bias, name="scores"), axis=-1, name="y")
    keep = np.array([[True, True, False, True]])
    ranges = bw.calibrate(b.build(y), [{"x": np.ones((1, 4), np.float32), "keep": keep}])
    assert set(ranges) == {"x", "y"}


def test_subset_and_patience():
    data = batches(40)
    assert bw.calibrate(perceptron(), data, subset=5).batches == 5
    assert bw.calibrate(perceptron(), iter(data), subset=5).batches == 5
    assert bw.calibrate(perceptron(), data[:1] * 40, patience=3).batches == 4


def test_statistics_go_to_a_file_and_come_back(tmp_path):
    ranges = bw.calibrate(perceptron(), batches(3), save=tmp_path / "s.stats")
    back = Ranges.load(tmp_path / "s.stats")
    assert list(back) == list(ranges) and back.batches == 3 and back.same == ranges.same
    for name in back.statistics:
        assert back[name] == ranges[name]


@pytest.mark.parametrize("sends", [raises, lambda: os.kill(os.getpid(), signal.SIGINT)])
def test_an_interrupted_run_is_saved_and_resumed(tmp_path, sends):
    data, path = batches(8), tmp_path / "s.stats"
    source = Interrupted(data, 5, sends)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            bw.calibrate(perceptron(), source, save=path)
    finally:
        signal.signal(signal.SIGINT, before)
    assert Ranges.load(path).batches in (5, 6)
    whole = bw.calibrate(perceptron(), data)
    resumed = bw.calibrate(perceptron(), source, save=path, resume=True)
    assert resumed.batches == 8 == Ranges.load(path).batches
    for name, expected in whole.statistics.items():
        np.testing.assert_array_equal(resumed[name].counts, expected.counts)


def test_no_file_is_written_when_calibration_fails(tmp_path):
    with pytest.raises(BitwrightError):
        bw.calibrate(perceptron(), [{"x": np.full((1, 8), np.nan, "f")}], save=tmp_path / "s")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("data", [b"", b"BWRANGE1", b"BWRANGE1" + b"\xff" * 30, b"x" * 100])
def test_other_bytes_are_not_statistics(data, tmp_path):
    (tmp_path / "s").write_bytes(data)
    with pytest.raises(BitwrightError):
        Ranges.load(tmp_path / "s")
