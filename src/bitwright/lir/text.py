"""A schedule as text with its memory plan: offsets and bytes of buffers, and when they live.

arena 81,920 bytes; at least 65,536 live at once
h: f32[8192] in arena at 0, 32,768 bytes, steps 0-2
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from bitwright.lir.plan import Planner, byte_size
from bitwright.lir.schedule import Schedule


def planned_text(schedule: Schedule, bindings: Mapping[str, int]) -> str:
    """The schedule with its plan at these sizes."""
    lines = [*_memory_lines(schedule, bindings), *schedule.step_lines()]
    return "\n".join([f"schedule @{schedule.graph.name} {{", *(f"  {s}" for s in lines), "}"])


def _memory_lines(schedule: Schedule, bindings: Mapping[str, int]) -> Iterator[str]:
    planner = Planner(schedule)
    layout = planner.plan(bindings)
    ranges = {life.buffer: life for life in planner.lives}
    if bindings:
        yield "at " + ", ".join(f"{name}={size}" for name, size in bindings.items())
    yield f"arena {layout.total:,} bytes; at least {layout.lower_bound:,} live at once"
    for buffer in schedule.owned:
        nbytes = f"{byte_size(buffer, bindings):,} bytes"
        if buffer not in ranges:
            yield f"{buffer}, {nbytes}"
            continue
        life = ranges[buffer]
        when = f"steps {life.first}-{life.last}" if life.first < life.last else f"step {life.first}"
        yield f"{buffer} at {layout.offsets[buffer]:,}, {nbytes}, {when}"
