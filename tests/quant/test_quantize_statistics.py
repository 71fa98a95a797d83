"""Statistics of bw.quantize: saved, reused without data, resumed after Ctrl-C."""

import os
import signal

import numpy as np
import pytest
from small_models import Interrupted, raises

import bitwright as bw
from bitwright.errors import BitwrightError, CalibrationError, ParseError
from bitwright.quant import CalibrationEntry, CalibrationRecord
from bitwright.quant.calibration import stats_file
from bitwright.quant.calibration.stats import BATCHES_WITH_ROWS, StatsBuilder
from bitwright.quant.calibration.stats_file import StatsFile
from bitwright.quant.model.points import find_points


def network(seed=0):
    """A convolution and a matrix product: two kinds of windows."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    b = bw.Builder("net")
    x = b.input("x", "f32[n, 3, 8, 8]")
    y = b.relu(b.conv(x, draw(8, 3, 3, 3), draw(8), name="first"))
    y = b.reduce_mean(y, axes=[2, 3], keepdims=False)
    return b.build(logits=b.matmul(y, draw(8, 5), name="last"))


def batches(count, seed=1):
    rng = np.random.default_rng(seed)
    return [{"x": rng.normal(size=(2, 3, 8, 8)).astype(np.float32)} for _ in range(count)]


def constants(quantized):
    return [v.node.attrs["value"].tobytes() for v in quantized.graph.constants]


def test_another_recipe_needs_no_data(tmp_path):
    data, path = batches(9), tmp_path / "seen"
    first = bw.quantize(network(), data, statistics=path)
    assert constants(first) == constants(bw.quantize(network(), data))
    assert constants(bw.quantize(network(), statistics=path)) == constants(first)
    again = bw.quantize(network(), recipe="w8", statistics=path)
    assert constants(again) == constants(bw.quantize(network(), data, "w8"))
    assert [file.name for file in tmp_path.iterdir()] == ["seen"]


@pytest.mark.parametrize("sends", [raises, lambda: os.kill(os.getpid(), signal.SIGINT)])
@pytest.mark.parametrize(("count", "at"), [(7, 1), (7, 5), (40, 33)])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, sends, count, at):
    data, path = batches(count), tmp_path / "seen"
    source = Interrupted(data, at, sends)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt) as interrupt:
            bw.quantize(network(), source, statistics=path)
    finally:
        signal.signal(signal.SIGINT, before)
    assert f"{path}; the same command continues" in interrupt.value.__notes__[0]
    if at > 1:
        bw.quantize(network(), statistics=path)  # partial statistics are usable
    resumed = bw.quantize(network(), source, statistics=path)
    assert constants(resumed) == constants(bw.quantize(network(), data))
    assert constants(bw.quantize(network(), statistics=path)) == constants(resumed)


def test_an_interrupt_after_the_data_saves_statistics(tmp_path, monkeypatch):
    data, file = batches(3), StatsFile(tmp_path / "seen", is_temporary=True)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as interrupt:
        patch.setattr("bitwright.quant.model.stages.assign", lambda *_: raises())
        bw.quantize(network(), data, statistics=file)
    assert file.path.exists() and "3 batches" in interrupt.value.__notes__[0]
    resumed = bw.quantize(network(), data, statistics=file)
    assert constants(resumed) == constants(bw.quantize(network(), data))
    assert not list(tmp_path.iterdir())


def test_nothing_is_saved_after_an_error(tmp_path):
    data = batches(3)
    data[2]["x"][0] = np.nan
    with pytest.raises(CalibrationError, match="batch 2"):
        bw.quantize(network(), data, statistics=tmp_path / "seen")
    with pytest.raises(KeyboardInterrupt) as interrupt:
        bw.quantize(network(), Interrupted(batches(3), 0, raises), statistics=tmp_path / "seen")
    assert not list(tmp_path.iterdir()) and not hasattr(interrupt.value, "__notes__")


def test_more_data_is_added_and_other_data_is_an_error(tmp_path):
    data, path = batches(6), tmp_path / "seen"
    bw.quantize(network(), data[:4], statistics=path)
    bw.quantize(network(), data, statistics=path)
    for other in (batches(6, seed=2), data[:4], data[::-1]):
        with pytest.raises(CalibrationError, match="does not begin with the 6 batches"):
            bw.quantize(network(), other, statistics=path)


def test_unusable_files_are_errors(tmp_path, monkeypatch):
    data, path = batches(2), tmp_path / "seen"
    bw.quantize(network(), data, statistics=path)
    with pytest.raises(CalibrationError, match="seen belong to another model"):
        bw.quantize(network(seed=5), data, statistics=path)
    with monkeypatch.context() as later:
        later.setattr(stats_file, "FORMAT", stats_file.FORMAT + 1)
        with pytest.raises(ParseError, match=r"another format version.*remove this one"):
            bw.quantize(network(), data, statistics=path)
    ranges = bw.calibrate(network(), data, save=tmp_path / "ranges")
    record = CalibrationRecord({"logits": CalibrationEntry.per_tensor(1.0, dtype="int8")})
    for statistics in (ranges, record, tmp_path / "ranges"):
        with pytest.raises(CalibrationError, match=r"holds ranges.*insert_q_dq"):
            bw.quantize(network(), data, statistics=statistics)
    whole = path.read_bytes()
    for damaged in (b"", b"PK", b"x" * 100, whole[:-40], whole[:200] + bytes(50) + whole[250:]):
        (tmp_path / "damaged").write_bytes(damaged)
        with pytest.raises(BitwrightError, match="damaged"):
            bw.quantize(network(), data, statistics=tmp_path / "damaged")
    for statistics, message in (
        (None, "data, or a file of statistics"),
        (tmp_path / "none", "found no file"),
        (3, "statistics is not a path"),
    ):
        with pytest.raises(CalibrationError, match=message):
            bw.quantize(network(), statistics=statistics)
    with pytest.raises(BitwrightError, match="cannot write"):
        bw.quantize(network(), data, statistics=tmp_path / "none" / "seen")


@pytest.mark.parametrize("count", [None, 4, 320])
def test_memory_does_not_grow_with_the_batches(count):
    graph = network()
    builder = StatsBuilder(graph, find_points(graph), count=count)
    data = batches(1)
    sizes = []
    for number in range(1, 321):
        builder.step(data[0])
        if number >= 2 * BATCHES_WITH_ROWS:
            samples = [s for e in builder.stats.values() for s in e.samples.values()]
            sizes.append(max(sum(len(rows) for rows in s.rows) for s in samples))
    assert max(sizes) <= (512 if count == 320 else sizes[0])


def test_inputs_of_ml_dtypes(tmp_path):
    b = bw.Builder("narrow")
    x = b.cast(b.input("x", "bf16[n, 8]"), to="f32")
    weight = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    graph = b.build(y=b.matmul(x, weight))
    data = [{"x": np.ones((3, 8), bw.dtype("bf16").numpy) * i} for i in range(1, 4)]
    first = bw.quantize(graph, data, statistics=tmp_path / "seen")
    assert constants(bw.quantize(graph, statistics=tmp_path / "seen")) == constants(first)
