"""bw.hardware(): facts, measurements that are remembered, other targets."""

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

import bitwright as bw
from bitwright import knobs, target
from bitwright.backends.cpu.profile.peaks import Level, Peaks
from bitwright.cli import main
from bitwright.errors import BitwrightError
from bitwright.machine import facts, measure, preferences, remembered
from bitwright.machine.timing import Timing, time_sides


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv(knobs.CACHE.name, str(folder))
    return folder


@pytest.fixture
def quick(monkeypatch):
    """Measurements that take no time; returns how often they were taken."""
    counts = {"peaks": 0}
    products = {"f64": 1e9, "f32": 2e9, "int8": 8e9, "bf16": 4e9, "int16": 3e9, "int8_pairs": 3e9}

    def measure_products(threads):
        return {name: threads * rate for name, rate in products.items()}

    def measure_peaks(threads):
        counts["peaks"] += 1
        found = measure_products(threads)
        return Peaks(threads, 2e9, 8e9, (Level("memory", float("inf"), 1e9),), found)

    wanted = preferences.Preferences(
        {1: 10.0, 8: 95.0, 64: 100.0},
        {1: 1.0, 2: 1.9},
        {32: 1.04, 64: 1.0},
        {"channels_first": 1.0, "channels_last": 0.9},
        {"symmetric": 1.0, "asymmetric": 1.2},
    )
    monkeypatch.setattr("bitwright.backends.cpu.profile.peaks.measure", measure_peaks)
    monkeypatch.setattr("bitwright.backends.cpu.profile.peaks.measure_products", measure_products)
    monkeypatch.setattr(preferences, "measure_preferences", lambda threads: wanted)
    monkeypatch.setattr(measure, "measure_rate", lambda dtype: 1.5e9)
    return counts


def test_facts_without_measurements(cache):
    hw = bw.hardware(measure=False)
    host = target.host()
    assert hw.parallel_units == host.cores and hw.vector_bytes == host.vector_bytes
    assert hw.peaks is None and hw.preferences is None and hw.threads == host.cores
    assert hw.gpus or hw.why_no_gpu
    found = hw.accelerated("int8")
    assert found.rate is None and found.share is None and "not measured" in str(found)
    assert found.kernel and bool(found) == found.accelerated
    assert not cache.exists() or not list(cache.glob("machine-*"))


def test_measured_once_and_remembered(cache, quick):
    hw = bw.hardware(threads=2)
    assert hw.peaks.products["f32"] == 4e9 and hw.preferences.batch_size == 8
    assert hw.accelerated("f32").share == pytest.approx(0.75)
    assert bw.hardware(measure=False, threads=2).peaks == hw.peaks
    assert bw.hardware(threads=2).preferences == hw.preferences
    assert quick["peaks"] == 1
    bw.hardware(measure=True, threads=2)
    assert quick["peaks"] == 2
    assert bw.hardware(measure=False, threads=3).peaks is None
    with pytest.raises(BitwrightError, match="threads must be at least 1"):
        bw.hardware(threads=0)


def test_a_damaged_file_is_no_measurement(cache, quick):
    bw.hardware(threads=2)
    for file in cache.glob("machine-*"):
        file.write_bytes(file.read_bytes()[:-3])
    assert bw.hardware(measure=False, threads=2).peaks is None
    host = target.host()
    for wrong in ({"peaks": 3, "prefer": []}, {"peaks": {"products": {}}, "prefer": {"a": 1}}):
        remembered.write(host, 2, wrong)
        hw = bw.hardware(measure=False, threads=2)
        assert hw.peaks is None and hw.preferences is None


def test_without_a_cache_folder_measurements_last_as_long_as_the_process(monkeypatch, quick):
    monkeypatch.setenv(knobs.CACHE.name, "off")
    bw.hardware(threads=5)
    assert bw.hardware(measure=False, threads=5).peaks is not None


def test_a_peak_is_never_lowered(quick):
    known = Peaks(2, 9e9, None, (Level("memory", float("inf"), 5e9),), {"f32": 9e9, "int8": 1.0})
    single = dict.fromkeys(("f64", "f32", "int8", "bf16", "int16", "int8_pairs"), 1.0)
    found = measure.measure_peaks(2, single, known)
    assert found.products["f32"] == 9e9 and found.products["int8"] == 16e9 and found.memory == 5e9


@pytest.mark.parametrize("name", ["avx2", "sse2"])
def test_another_target(cache, monkeypatch, name):
    if not target.named(name).runs_here():
        pytest.skip(f"{name} does not run here")
    monkeypatch.setenv(knobs.TARGET.name, name)
    hw = bw.hardware(measure=False)
    assert hw.target == name and "bf16" not in hw.features
    found = hw.accelerated("bf16")
    assert not found and found.kernel == "matmul_bf16"
    if "bf16" in hw.excluded:
        assert "BITWRIGHT_TARGET excludes this machine's" in found.reason
    assert hw.accelerated("uint8").instruction in ("vpmaddubsw", "pmaddwd")
    monkeypatch.delenv(knobs.TARGET.name)
    if target.host().name != name:
        with pytest.raises(BitwrightError, match="of another target"):
            hw.accelerated("int8")


def test_really_measured(cache, monkeypatch):
    """The measurements themselves, shortened."""
    for module in (measure, preferences):
        monkeypatch.setattr(module, "_SECONDS", 0.01)
    assert measure.measure_rate("uint8") > 1e6
    found = preferences.measure_preferences(1)
    assert found.threads == 1 and found.batch_size in found.batch_rates
    assert found.block_size in preferences.BLOCKS and len(found.schemes) == 2
    assert preferences.Preferences.from_json(json.loads(json.dumps(found.as_json()))) == found
    assert set(found.reasons()) == {"batch_size", "block_size", "layout", "schemes", "threads"}


def test_preferences_of_equal_times():
    wanted = preferences.Preferences(
        {1: 1.0}, {1: 1.0}, {64: 1.0}, {"channels_first": 1.0, "channels_last": 1.02},
        {"symmetric": 1.04, "asymmetric": 1.0},
    )  # fmt: skip
    assert wanted.schemes == ("symmetric", "asymmetric") and wanted.layout == "channels_first"
    assert preferences.Preferences.from_json({"batch_rates": {}}) is None


def test_timings():
    calls = []
    found = time_sides({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 0)
    assert calls[:2] == ["a", "b"] and calls[2:6] == ["a", "a", "b", "b"]
    assert len(found["a"].seconds) == 3
    timing, other = Timing((1.0, 2.0, 4.0)), Timing((2.0, 6.0, 4.0))
    assert timing.median == 2 and timing.minimum == 1 and timing.quartiles == (1.5, 3.0)
    assert timing.times_faster_than(other) == 2
    assert preferences.thread_counts(6) == [1, 2, 4, 6] and preferences.thread_counts(1) == [1]


def test_command(cache, quick):
    run = CliRunner().invoke(main, ["hardware", "--no-measure"])
    assert run.exit_code == 0 and "peaks: not measured" in run.output
    assert "not measured" in run.output and "matmul_f32" in run.output
    run = CliRunner().invoke(main, ["hardware", "--threads", "2"])
    assert run.exit_code == 0 and "peaks of 2 threads" in run.output
    assert "batch size: 8 (95% of the best rate" in run.output
    run = CliRunner().invoke(main, ["hardware", "--threads", "2", "--json"])
    found = json.loads(run.output)
    assert found["preferences"]["batch_size"] == 8 and len(found["types"]) == 16
    assert found["types"][1]["dtype"] == "f32" and found["gpus"] == [
        gpu.as_json() for gpu in facts._gpus()[0]
    ]


def test_plain_facts_do_not_import_the_compiler():
    text = (
        "import sys, bitwright as bw; bw.QuantizationSystem('cpu').hardware.features; "
        "print('bitwright.pipeline' in sys.modules)"
    )
    found = subprocess.run(
        [sys.executable, "-c", text],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, knobs.CACHE.name: "off"},
    )
    assert found.stdout.strip() == "False"
