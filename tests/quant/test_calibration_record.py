"""Ranges -> calibration record, and errors for wrong objects."""

import numpy as np
import pytest
from small_models import batches, branches, counter, perceptron

import bitwright as bw
from bitwright import demo
from bitwright.errors import BitwrightError, CalibrationError, QuantizationError
from bitwright.quant import (
    CalibrationEntry,
    CalibrationRecord,
    Calibrator,
    Observer,
    Ranges,
    Statistics,
    choose,
    insert_q_dq,
)
from bitwright.report.compare import compare
from bitwright.warn import DataWarning

METHODS = ("minmax", "percentile(99)", "entropy", "mse", "adaptive", lambda seen: (-1.0, 2.0))


def with_dead_channels(values=(0.0, 3.0, 0.0)):
    """A value [n, 3] whose channels are scaled by these numbers."""
    b = bw.Builder("dead")
    x = b.input("x", "f32[n, 3]")
    return b.build(b.relu(b.mul(x, np.array(values, np.float32), name="m"), name="y"))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int4"])
def test_ranges_become_a_record_in_one_call(method, dtype):
    graph, data = perceptron(), batches(6)
    ranges = bw.calibrate(graph, data)
    record = ranges.record(dtype, method)
    assert set(record) == set(ranges.statistics)
    for name, entry in record.items():
        expected = choose(ranges[name], dtype, method=method)
        assert entry.axis is None and entry.dtype == expected.dtype.element
        assert entry.scales == expected.scale and entry.zero_points == expected.zero_point
    quantized = insert_q_dq(graph, record)
    assert quantized.value("y").node.inputs[0].node.op == "dequantize"


def test_a_record_of_the_demo_model_preserves_its_outputs():
    graph = bw.load(demo.model_path())
    ranges = bw.calibrate(demo.model_path(), demo.calibration())
    quantized = insert_q_dq(graph, ranges.record("uint8", "mse"))
    found = compare(graph, quantized, demo.calibration()[:1], layers=False)
    assert found.outputs["logits"].sqnr_db > 30


def test_statistics_along_an_axis_become_scales_per_channel():
    data = batches(4)
    ranges = bw.calibrate(perceptron(), data, values=["h", "y"], axes={"h": -1})
    record = ranges.record("int8")
    assert record["h"].axis == -1 and record["y"].axis is None
    np.testing.assert_allclose(record["h"].scales, ranges["h"].max_abs / 127, rtol=1e-6)
    pair = insert_q_dq(perceptron(), record).value("y").node.inputs[0].node
    assert pair.op == "dequantize" and pair.attrs["axis"] == 1


@pytest.mark.parametrize("method", METHODS[:-1])
@pytest.mark.parametrize("dtype, scheme", [("int8", None), ("uint8", None), ("int8", "asymmetric")])
def test_dead_channels_get_scale_1(method, dtype, scheme):
    graph = with_dead_channels()
    x = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    ranges = bw.calibrate(graph, [x], values=["m"], axes={"m": 1})
    entry = ranges.record(dtype, method, scheme=scheme)["m"]
    assert entry.scales[0] == entry.scales[2] == 1 and entry.zero_points[0] == 0
    assert 0 < entry.scales[1] < 1
    quantized = insert_q_dq(graph, CalibrationRecord({"m": entry}))
    found = bw.compile(quantized).run({"x": x})["y"]
    assert not found[:, [0, 2]].any()
    np.testing.assert_allclose(found[:, 1], np.maximum(x[:, 1] * 3, 0), atol=entry.scales[1])


def test_a_tensor_of_zeros_gets_scale_1():
    graph = with_dead_channels((0, 0, 0))
    ranges = bw.calibrate(graph, [np.ones((2, 3), np.float32)], values=["m"])
    assert ranges.record("int8")["m"].scales == 1


def test_values_that_the_data_never_reached_are_skipped_with_a_warning():
    feeds = {"flag": np.array(True), "x": np.array([1, -5, 3], np.float32)}
    calibrator = Calibrator(branches(), ["choice/then/r", "minus"])
    calibrator.step(feeds)
    with pytest.warns(DataWarning, match="never reached 'minus': left out of the record"):
        record = calibrator.record("int8")
    assert list(record) == ["choice/then/r"]
    with pytest.raises(CalibrationError, match="the data never reached 'minus'"):
        calibrator.record("int8", values=["minus"])
    assert insert_q_dq(branches(), record) is not None


def test_moved_values_are_left_out_unless_named():
    ranges = bw.calibrate(perceptron(), batches(2))
    assert ranges.same == {"t": "h"}
    assert "t" not in ranges.record("int8")
    record = ranges.record("int8", values=["t"])
    assert list(record) == ["t"] and record["t"] == ranges.record("int8")["h"]
    with pytest.raises(CalibrationError, match="no statistics of 'tt'"):
        ranges.record("int8", values=["tt"])


def test_unsupported_types_are_errors_that_name_the_value():
    ranges = bw.calibrate(perceptron(), batches(2))
    for dtype in ("binary", "mixed"):
        with pytest.raises(CalibrationError):
            ranges.record(dtype)
    with pytest.raises(CalibrationError, match="logarithmic int8"):
        ranges.record("int8", scheme="logarithmic")
    with pytest.raises(CalibrationError, match=r"value 'x'.*cannot represent negative values"):
        ranges.record("uint8", scheme="symmetric")


def test_float8_has_entries_too():
    ranges = bw.calibrate(perceptron(), batches(2))
    entry = ranges.record("f8e4m3fn")["h"]
    np.testing.assert_allclose(entry.scales, ranges["h"].max_abs / 448, rtol=1e-6)
    insert_q_dq(perceptron(), ranges.record("f8e4m3fn"))


def test_a_record_takes_quant_params_of_weights():
    graph = perceptron()
    w = graph.value("w2").node.attrs["value"]
    params = Observer(axis=1).add(w).calibrate("int8")
    record = CalibrationRecord({**bw.calibrate(graph, batches(2)).record(), "w2": params})
    assert record["w2"] == CalibrationEntry.from_params(params)
    assert insert_q_dq(graph, record).value("y").node.inputs[1].node.attrs["axis"] == 1


# values of the last step


def test_values_are_copies_of_the_last_step():
    calibrator = Calibrator(perceptron(), ["x", "h", "w1"])
    buffer = batches(1)[0]["x"].copy()
    expected = buffer.copy()
    calibrator.step({"x": buffer})
    buffer[...] = 0
    found = calibrator.values()
    np.testing.assert_array_equal(found["x"], expected)
    assert np.abs(found["h"]).max() == calibrator.max_abs()[1] > 0
    found["h"][...] = 7
    assert calibrator.values()["h"].max() != 7


def test_values_of_random_ops_match_the_statistics():
    b = bw.Builder("noise")
    x = b.input("x", "f32[64]")
    noise = b.random_normal(shape=(64,), name="noise")
    graph = b.build(b.add(x, noise, name="y"))
    calibrator = Calibrator(graph, ["y"])
    calibrator.step({"x": np.zeros(64, np.float32)})
    assert np.abs(calibrator.values()["y"]).max() == calibrator.max_abs()[0]


def test_values_are_read_once_in_several_runs_and_bodies():
    calibrator = Calibrator(perceptron(), ["m", "h", "y"], budget=0)
    runs = []
    for feeds in batches(2):
        calibrator.step(feeds)
        runs.append(calibrator.values())
    assert [v["h"].shape for v in runs] == [(3, 8), (5, 8)]
    without = Calibrator(perceptron(), ["m"], keep_values=False)
    without.step(batches(1)[0])
    with pytest.raises(CalibrationError, match="values were not kept"):
        without.values()


# rejected batches


@pytest.mark.parametrize("budget", [None, 0])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_rejected_batch_changes_nothing(budget, threads, monkeypatch):
    monkeypatch.setattr(
        "bitwright.quant.calibration.calibrate.MIN_SHARE", 1
    )  # so that threads are used
    options = {"axes": {"h": 1}, "budget": budget, "threads": threads}
    calibrator = Calibrator(perceptron(), ["y", "x", "m", "h"], **options)
    other = Calibrator(perceptron(), ["y", "x", "m", "h"], **options)
    good = batches(3)
    calibrator.step(good[0])
    values = calibrator.values()
    bad = good[1]["x"].copy()
    bad[-1, -1] = np.nan
    with pytest.raises(CalibrationError, match="batch 1 of the data"):
        calibrator.step({"x": bad})
    assert calibrator.ranges.batches == 1
    for name, found in calibrator.values().items():
        np.testing.assert_array_equal(found, values[name])
    calibrator.step(good[2])
    other.step(good[0])
    other.step(good[2])
    for name in calibrator.taps:
        assert calibrator.ranges[name] == other.ranges[name]


def test_a_rejected_first_batch_changes_nothing():
    calibrator = Calibrator(perceptron(), ["x", "m"], axes={"m": 0})
    with pytest.raises(CalibrationError):
        calibrator.step({"x": np.full((2, 8), np.inf, np.float32)})
    assert calibrator.ranges["x"] == Statistics() and calibrator.ranges["m"] == Statistics(0)
    with pytest.raises(CalibrationError, match="no batch has been run"):
        calibrator.values()


def test_a_rejected_batch_does_not_change_states():
    calibrator = Calibrator(counter(), ["after"])
    calibrator.step({"x": np.array([1, 2], np.float32)})
    with pytest.raises(CalibrationError):
        calibrator.step({"x": np.array([np.inf, 0], np.float32)})
    calibrator.step({"x": np.array([1, 2], np.float32)})
    assert calibrator.values()["after"].tolist() == [2, 4]


@pytest.mark.parametrize("axis", [None, 0])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_an_array_that_an_observer_rejects_changes_nothing(axis, bad):
    x = np.random.default_rng(0).normal(size=(4, 200_000 if axis is None else 50))
    broken = x.astype(np.float32)
    broken[-1, -1] = bad
    observer = Observer(axis).add(x[:, :50])
    expected = observer.statistics.copy()
    held = observer.statistics
    with pytest.raises(QuantizationError, match="array 2 holds values that are not finite"):
        observer.add(broken * 100)
    assert observer.statistics is held and held == expected and observer.arrays == 1
    fresh = Observer(axis)
    with pytest.raises(QuantizationError):
        fresh.add(broken)
    assert fresh.statistics == Statistics(axis) and fresh.arrays == 0


# wrong objects raise BitwrightError


X = np.ones((4, 8), np.float32)
GRAPH = perceptron()
WRONG = {
    "ranges as record": lambda: insert_q_dq(GRAPH, bw.calibrate(GRAPH, [X])),
    "no record": lambda: insert_q_dq(GRAPH, None),
    "names as record": lambda: insert_q_dq(GRAPH, ["h"]),
    "a scale as entry": lambda: insert_q_dq(GRAPH, {"h": 0.1}),
    "a path as graph": lambda: insert_q_dq("model.onnx", {}),
    "statistics as entry": lambda: CalibrationRecord({"h": Statistics()}),
    "a path to calibrate": lambda: Calibrator("model.onnx", ["h"]),
    "one name as taps": lambda: Calibrator(GRAPH, "h"),
    "a number as taps": lambda: Calibrator(GRAPH, 3),
    "a number as tap": lambda: Calibrator(GRAPH, [3]),
    "a list of axes": lambda: Calibrator(GRAPH, ["h"], axes=[1]),
    "a word as axis": lambda: Calibrator(GRAPH, ["h"], axes={"h": "last"}),
    "an array as batch": lambda: Calibrator(GRAPH, ["h"]).step(X),
    "nothing as batch": lambda: Calibrator(GRAPH, ["h"]).step(None),
    "a dict merged": lambda: Calibrator(GRAPH, ["h"]).merge({"h": 1}),
    "nothing merged": lambda: Ranges().merge(None),
    "statistics merged": lambda: Observer().merge(Statistics()),
    "an array merged": lambda: Statistics().merge(X),
    "an array chosen for": lambda: choose(X, "int8"),
    "an observer chosen for": lambda: choose(Observer().add(X), "int8"),
    "array as statistics": lambda: bw.QuantParams.from_statistics(X, "int8"),
    "array for the system": lambda: bw.QuantizationSystem().parameters("int8", statistics=X),
    "entry as parameters": lambda: CalibrationEntry.from_params(CalibrationEntry.per_tensor(1.0)),
    "ranges as data": lambda: bw.quantize(GRAPH, bw.calibrate(GRAPH, [X])),
    "ranges as calibration data": lambda: bw.calibrate(GRAPH, bw.calibrate(GRAPH, [X])),
    "ragged array": lambda: Observer().add([[1], [1, 2]]),
    "text as array": lambda: Observer().add("abc"),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=list(WRONG))
def test_a_wrong_object_raises_a_bitwright_error(call):
    with pytest.raises(BitwrightError) as raised:
        call()
    assert str(raised.value)


def test_errors_for_ranges_name_the_record_method():
    ranges = bw.calibrate(GRAPH, [X])
    for call in (
        lambda: insert_q_dq(GRAPH, ranges),
        lambda: bw.quantize(GRAPH, ranges),
    ):
        with pytest.raises(CalibrationError, match=r"ranges\.record\('int8', 'minmax'\)"):
            call()
