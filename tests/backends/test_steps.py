"""Step tables: where the barriers are, and which steps one thread runs."""

from dataclasses import replace

import numpy as np
import pytest

from bitwright.backends.cpu.backend import CpuBackend
from bitwright.backends.cpu.runtime.memory import PlannedMemory, address_of, allocate
from bitwright.backends.cpu.runtime.pool import Pool
from bitwright.backends.cpu.runtime.program import Program
from bitwright.backends.cpu.runtime.shared_block import ALONE, BARRIER_AFTER
from bitwright.backends.cpu.runtime.steps import StepTable
from bitwright.ir.dim import evaluate
from bitwright.lir.buffer import Storage, View
from bitwright.lir.plan import plan
from bitwright.ops.core.builder import Builder
from bitwright.target import host

BOTH = ALONE | BARRIER_AFTER


def chain() -> Program:
    """Sums of the rows of x, a few steps on them, and one more step on x."""
    b = Builder("chain")
    x = b.input("x", "f32[n, 64]")
    few = b.softmax(b.softmax(b.reduce_sum(x, axes=[1], keepdims=True), axis=0), axis=0)
    return CpuBackend(host()).compile(b.build(y=b.softmax(b.add(x, few))), threads=3)


def flags(program: Program, rows: int, small: int) -> list[int]:
    program._pool = Pool(3)
    program._pool._small = small
    x = np.random.default_rng(0).standard_normal((rows, 64)).astype(np.float32)
    first = program.run({"x": x})["y"]
    for _ in range(3):
        assert program.run({"x": x})["y"].tobytes() == first.tobytes()
    program._pool.close()
    ((_, (table,)),) = program._plans.tables.values()
    return table.rows[2::3].tolist()


def test_all_threads_run_every_step_if_barriers_are_free():
    assert flags(chain(), 9, 0) == [BARRIER_AFTER] * 3 + [BARRIER_AFTER, 0]


def test_consecutive_small_steps_need_no_barrier():
    # sums of large x, two small steps by one thread, then x again
    assert flags(chain(), 9, 200) == [BARRIER_AFTER, ALONE, BOTH, BARRIER_AFTER, 0]


@pytest.mark.parametrize("rows", [0, 1, 9])
def test_a_table_of_small_steps_has_no_barrier(rows):
    program = chain()
    assert flags(program, rows, 1 << 20) == [ALONE] * 5
    ((_, (table,)),) = program._plans.tables.values()
    assert table.is_alone


def many_slots() -> Program:
    """Slices with symbolic offsets of inputs and constants, and dependent steps."""
    b = Builder("slots")
    x = b.input("x", "f32[n, m]")
    table = b.constant(np.arange(700, dtype=np.float32).reshape(100, 7))
    n = x.shape[0]
    rows = b.slice(table, starts=[n], stops=[2 * n], axes=[0], steps=[1])
    half = b.slice(x, starts=[n // 2], stops=[2 * (n // 2)], axes=[0], steps=[1])
    y = b.matmul(b.softmax(x), b.constant(np.ones((7, 5), np.float32)))
    return CpuBackend(host()).compile(
        b.build(y=y, rows=b.relu(rows), half=b.softmax(half)), threads=2
    )


@pytest.mark.parametrize("n", [0, 1, 2, 7, 33])
def test_slots_hold_the_operands_of_each_step(n):
    program = many_slots()
    x = np.random.default_rng(n).standard_normal((n, 7)).astype(np.float32)
    for rows in (5, n):  # the segment is used for two sets of sizes
        found = program.run({"x": x[:rows] if rows <= n else np.resize(x, (rows, 7))})
    assert found["rows"].tolist() == np.arange(700.0).reshape(100, 7)[n : 2 * n].tolist()
    (segment,), bindings = program._code.segments, {"n": n, "m": 7}
    layout = plan(program.schedule, bindings)
    memory = PlannedMemory(bindings, layout, allocate(layout.total))
    for buffer in program.schedule.buffers:
        if buffer.storage in (Storage.INPUT, Storage.OUTPUT, Storage.STATE):
            memory.give(buffer, np.zeros(max(1, evaluate(buffer.count, bindings)), np.int64))

    def address(view: View) -> int:
        offset = evaluate(view.offset, bindings) * view.dtype.numpy.itemsize
        return address_of(memory.raw(view.buffer)) + offset

    table = StepTable(segment, memory, 0)
    table.set_addresses()
    base, at = address_of(table.slots), 0
    for step, row in zip(segment.steps, table.rows.reshape(-1, 3).tolist(), strict=True):
        assert row[:2] == [program._code.addresses[step.kernel], base + 8 * at]
        for slot in program._code.signatures[step.kernel].slots:
            view = step.pointers.get(slot.name)
            size = evaluate(step.sizes[slot.name], bindings) if view is None else address(view)
            assert int(table.slots[at]) == size % (1 << 64), (step.kernel, slot.name)
            at += 1
    assert at == len(table.slots)


@pytest.mark.parametrize("n", [1, 7, 33])
def test_steps_between_two_barriers_touch_different_memory(n):
    program = many_slots()
    program.run({"x": np.ones((n, 7), np.float32)})
    ((memory, (table,)),) = program._plans.tables.values()
    (segment,) = program._code.segments
    table = StepTable(segment, memory, 0)
    phase: list[tuple[set[int], set[int]]] = []
    for step, flag in zip(segment.steps, table.rows[2::3].tolist(), strict=True):
        reads, writes = _cells(step.reads, memory), _cells(step.writes, memory)
        for read, written in phase:
            assert not (reads & written or writes & (read | written)), step
        phase = [] if flag & BARRIER_AFTER else [*phase, (reads, writes)]


def _cells(buffers, memory: PlannedMemory) -> set[int]:
    """The address ranges of arena buffers."""
    held = [memory.range(b) for b in buffers if b.storage is Storage.ARENA]
    return {at for start, end in held for at in range(start, end)}


def test_barriers_are_those_of_the_memory_plan():
    """Tables of one plan keep its barriers after tables of another plan were made."""
    b = Builder("plans")
    x, w = b.input("x", "f32[n, 8]"), b.constant(np.eye(8, dtype=np.float32))
    ends = [
        b.softmax(b.matmul(b.softmax(b.matmul(v, w)), w)) for v in (x, b.input("z", "f32[n, 8]"))
    ]
    program = CpuBackend(host()).compile(b.build(y=ends[0], z=ends[1]), threads=2)
    (segment,) = program._code.segments
    bindings = {"n": 9}
    apart = plan(program.schedule, bindings)
    starts = np.cumsum([0, *apart.nbytes.values()]).tolist()
    apart = replace(apart, offsets=dict(zip(apart.offsets, starts, strict=False)))
    together = replace(apart, offsets=dict.fromkeys(apart.offsets, 0))
    arena = allocate(starts[-1])
    memories = [PlannedMemory(bindings, one, arena) for one in (apart, together, apart)]
    first, other = (StepTable(segment, memory) for memory in memories[:2])
    again = StepTable(segment, memories[2], like=first)
    assert first.rows[2::3].tolist() != other.rows[2::3].tolist()
    assert again.rows[2::3].tolist() == first.rows[2::3].tolist()
