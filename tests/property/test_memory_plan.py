"""Memory plans of random schedules: live buffers never overlap."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from bitwright.ir.dim import symbol
from bitwright.ir.dtype import DTYPES
from bitwright.ir.graph import Graph
from bitwright.lir.buffer import Buffer, Storage, contiguous
from bitwright.lir.plan import ALIGN, byte_size, live_ranges, plan
from bitwright.lir.schedule import KernelStep, Schedule, verify_schedule

BATCH = symbol("n")
ELEMENTS = [DTYPES[name] for name in ("f32", "f64", "u8", "f16", "i4")]


def random_schedule(seed: int) -> Schedule:
    """Steps that read buffers of earlier steps and write one to three buffers."""
    random = np.random.default_rng(seed)
    schedule = Schedule(Graph(f"random{seed}", (), ()))
    source = Buffer("x", ELEMENTS[0], 64, Storage.INPUT)
    schedule.buffers.append(source)
    written = [source]
    for number in range(int(random.integers(1, 40))):
        reads = [written[i] for i in random.integers(0, len(written), random.integers(1, 4))]
        writes = []
        for part in range(int(random.integers(1, 4))):
            count = int(random.choice([0, 1, 3, 16, 100, 1000, 4096]))
            size = count * BATCH if random.random() < 0.5 else count
            element = ELEMENTS[random.integers(len(ELEMENTS))]
            storage = Storage.OUTPUT if random.random() < 0.1 else Storage.ARENA
            writes.append(Buffer(f"b{number}.{part}", element, size, storage))
        schedule.buffers += writes
        slots = {b.name: contiguous(b, (b.count,)) for b in (*reads, *writes)}
        schedule.steps.append(
            KernelStep("kernel", f"step{number}", slots, {}, tuple(reads), tuple(writes))
        )
        written += writes
    last = written[-1]
    schedule.outputs["y"] = contiguous(last, (last.count,))
    return verify_schedule(schedule)


@pytest.mark.parametrize("seed", range(150))
def test_live_buffers_never_overlap(seed: int) -> None:
    schedule = random_schedule(seed)
    for batch in (0, 1, 7):
        made = plan(schedule, {"n": batch})
        owner = np.full(made.total, -1)
        ranges = live_ranges(schedule)
        assert {life.buffer for life in ranges} == set(made.offsets)
        for step in range(len(schedule.steps) + 1):
            owner[:] = -1
            for number, life in enumerate(ranges):
                if life.first <= step <= life.last:
                    start = made.offsets[life.buffer]
                    nbytes = made.nbytes[life.buffer]
                    taken = owner[start : start + nbytes]
                    assert len(taken) == nbytes == byte_size(life.buffer, {"n": batch})
                    assert start % ALIGN == 0
                    assert (taken == -1).all(), f"step {step}: {life.buffer.name}"
                    taken[:] = number
        assert made.lower_bound <= made.total


def test_a_chain_needs_two_buffers_at_once() -> None:
    schedule = Schedule(Graph("chain", (), ()))
    buffers = [Buffer(f"b{i}", ELEMENTS[0], 1024) for i in range(10)]
    buffers.insert(0, Buffer("x", ELEMENTS[0], 1024, Storage.INPUT))
    schedule.buffers += buffers
    for before, after in itertools.pairwise(buffers):
        slots = {b.name: contiguous(b, (b.count,)) for b in (before, after)}
        schedule.steps.append(KernelStep("copy", after.name, slots, {}, (before,), (after,)))
    assert plan(schedule, {}).total == 2 * 4096
