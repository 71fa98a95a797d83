"""The memory of a compiled model: its constants and its arena."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bitwright.backends.cpu.runtime.program import Program
from bitwright.executable import Executable
from bitwright.lir.plan import plan


def constant_bytes(exe: Executable) -> int:
    """Bytes of packed weights and other constants, of the graph and of all bodies."""
    engine = exe.engine
    return _constants(engine.artifact) if isinstance(engine, Program) else 0


def _constants(artifact: Any) -> int:
    held = sum(b.array.nbytes for b in artifact.schedule.buffers if b.array is not None)
    bodies = (body for bodies in artifact.bodies.values() for body in bodies.values())
    return int(held) + sum(map(_constants, bodies))


def arena_bytes(exe: Executable, sizes: Mapping[str, int]) -> int | None:
    """Bytes of intermediate values; None if they depend on data or the interpreter runs."""
    engine = exe.engine
    if not isinstance(engine, Program) or not engine.schedule.symbols <= set(sizes):
        return None
    return plan(engine.schedule, sizes).total
