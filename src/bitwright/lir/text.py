"""The text of a schedule with its memory plan: offsets, bytes and live ranges of buffers.

arena 81,920 bytes; at least 65,536 live at once
h: f32[8192] in arena at 0, 32,768 bytes, steps 0-2

The text is for people: there is no parser.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from bitwright.lir.plan import Planner, byte_size
from bitwright.lir.schedule import Schedule


def planned_text(schedule: Schedule, bindings: Mapping[str, int]) -> str:
    """The text of a schedule with its memory plan at these sizes."""
    lines = [*_memory_lines(schedule, bindings), *schedule.step_lines()]
    return "\n".join([f"schedule @{schedule.graph.name} {{", *(f"  {s}" for s in lines), "}"])


def _memory_lines(schedule: Schedule, bindings: Mapping[str, int]) -> Iterator[str]:
    planner = Planner(schedule)
    layout = planner.plan(bindings)
    ranges = {live.buffer: live for live in planner.ranges}
    if bindings:
        yield "at " + ", ".join(f"{name}={size}" for name, size in bindings.items())
    yield f"arena {layout.total:,} bytes; at least {layout.lower_bound:,} live at once"
    for buffer in schedule.owned:
        nbytes = f"{byte_size(buffer, bindings):,} bytes"
        if buffer not in ranges:
            yield f"{buffer}, {nbytes}"
            continue
        live = ranges[buffer]
        when = f"steps {live.first}-{live.last}" if live.first < live.last else f"step {live.first}"
        yield f"{buffer} at {layout.offsets[buffer]:,}, {nbytes}, {when}"
