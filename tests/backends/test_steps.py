"""Step tables: where threads meet, and which steps one thread does alone."""

import numpy as np
import pytest

from bitwright.backends.cpu.pool import Pool
from bitwright.backends.cpu.program import Program
from bitwright.backends.cpu.shared_block import ALONE, BARRIER_AFTER
from bitwright.ops.builder import Builder
from bitwright.target import host

BOTH = ALONE | BARRIER_AFTER


def chain() -> Program:
    """Sums of x along rows, a few steps with those, and one step with x again."""
    b = Builder("chain")
    x = b.input("x", "f32[n, 64]")
    few = b.softmax(b.softmax(b.reduce_sum(x, axes=[1], keepdims=True), axis=0), axis=0)
    return Program(b.build(y=b.softmax(b.add(x, few))), host(), threads=3)


def flags(program: Program, rows: int, small: int) -> list[int]:
    program._pool = Pool(3)
    program._pool._small = small
    x = np.random.default_rng(0).standard_normal((rows, 64)).astype(np.float32)
    first = program.run({"x": x})["y"]
    for _ in range(3):
        assert program.run({"x": x})["y"].tobytes() == first.tobytes()
    program._pool.close()
    ((_, (table,)),) = program._prepared.values()
    return table.rows[2::3].tolist()


def test_every_step_is_shared_where_meeting_is_free():
    assert flags(chain(), 9, 0) == [BARRIER_AFTER] * 3 + [BARRIER_AFTER, 0]


def test_small_steps_that_follow_each_other_need_no_meeting():
    # sums of large x, two small steps by one thread, then x again
    assert flags(chain(), 9, 200) == [BARRIER_AFTER, ALONE, BOTH, BARRIER_AFTER, 0]


@pytest.mark.parametrize("rows", [0, 1, 9])
def test_a_table_of_small_steps_has_no_meeting_at_all(rows):
    program = chain()
    assert flags(program, rows, 1 << 20) == [ALONE] * 5
    ((_, (table,)),) = program._prepared.values()
    assert table.is_alone
