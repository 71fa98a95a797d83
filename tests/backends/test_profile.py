"""Profiles of programs: every step once and in order, states and results unchanged; peaks."""

import ctypes

import numpy as np
import pytest

import bitwright as bw
from bitwright import system
from bitwright.backends.cpu.codegen import instr
from bitwright.backends.cpu.profile import peaks
from bitwright.backends.cpu.profile.steps import TimedTable, barrier_seconds
from bitwright.backends.cpu.runtime.memory import DynamicMemory
from bitwright.backends.cpu.runtime.pool import shared_pool
from bitwright.backends.cpu.runtime.shared_block import step_table
from bitwright.backends.cpu.runtime.steps import KernelSegment, StepTable
from bitwright.target import host


def draw(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def network():
    b = bw.Builder("network")
    x = b.input("x", "f32[batch, 24]")
    h = b.softmax(b.relu(b.matmul(x, b.constant(draw(24, 40)))))
    return b.build(y=b.matmul(h, b.constant(draw(40, 8))), top=b.reduce_max(h, axes=[1]))


def counter():
    b = bw.Builder("counter")
    total = b.state("total", np.zeros(3, np.float32))
    after = b.add(total, b.input("x", "f32[3]"))
    b.update(total, after)
    return b.build(y=b.mul(after, 2.0))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_step_is_timed_once_in_order(threads):
    exe = bw.compile(network(), threads=threads)
    x = draw(5, 24, seed=1)
    expected = exe.run({"x": x})
    found = exe.engine.profile({"x": x}, rounds=3)
    assert [timed.step for timed in found.steps] == exe.engine.schedule.steps
    assert all(timed.seconds >= 0 for timed in found.steps)
    assert found.threads == threads and found.bindings == {"batch": 5}
    assert min(found.run_seconds, found.barrier_seconds) > 0 and found.overhead_seconds >= 0
    for name, again in exe.run({"x": x}).items():
        assert again.tobytes() == expected[name].tobytes()


def test_states_do_not_change():
    exe = bw.compile(counter(), threads=1)
    exe.run({"x": np.ones(3, np.float32)})
    exe.engine.profile({"x": np.ones(3, np.float32)}, rounds=4)
    assert exe.run({"x": np.ones(3, np.float32)})["y"].tolist() == [4, 4, 4]


@pytest.mark.filterwarnings("ignore::bitwright.warn.BitwrightWarning")
def test_python_steps_and_data_dependent_sizes():
    b = bw.Builder("found")
    x = b.input("x", "f32[n]")
    graph = b.build(y=b.relu(b.cast(b.nonzero(b.relu(x)), to="f32")))
    exe = bw.compile(graph, threads=1)
    found = exe.engine.profile({"x": np.array([1, -1, 2], np.float32)}, rounds=2)
    assert [timed.step for timed in found.steps] == exe.engine.schedule.steps
    assert found.bindings["n"] == 3 and len(found.bindings) == 2


def test_an_empty_table_takes_no_time():
    table = TimedTable(step_table([]))
    table.run(shared_pool(1))
    assert table.seconds.size == 0
    assert barrier_seconds(shared_pool(1), rounds=2) > 0
    assert StepTable(KernelSegment([], {}, {}), DynamicMemory({})).count == 0


def test_peaks_are_measured_once():
    found = peaks.measure(1)
    assert found is peaks.measure(1) and found.threads == 1
    assert found.flops > 1e8 and found.memory > 1e7
    assert (found.integers is None) == (instr.dot_u8s8(host()) is None)
    sizes = [level.nbytes for level in found.levels]
    assert sizes == sorted(sizes) and found.levels[-1].name == "memory"
    assert found.level(1) is found.levels[0] and found.level(1 << 50) is found.levels[-1]


def test_the_python_clock_is_the_fallback(monkeypatch):
    address = ctypes.cast(system._python_clock, ctypes.c_void_p).value
    monkeypatch.setattr(system, "clock", lambda: (address, 0))
    for threads in (1, 2):
        exe = bw.compile(network(), threads=threads)
        found = exe.engine.profile({"x": draw(5, 24)}, rounds=2)
        assert len(found.steps) == len(exe.engine.schedule.steps) and found.barrier_seconds > 0
