"""The time of each step of a program: the minimum over rounds.

A kernel is launched several times in one CUDA graph; its operands are as warm in the L2 cache as
they are in a run. The values of
the run are not meaningful afterwards, so states are restored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from bitwright.backends.base import Profile, TimedStep
from bitwright.backends.gpu.requirements import load_torch
from bitwright.backends.gpu.runtime.capture import captured
from bitwright.lir.schedule import KernelStep

if TYPE_CHECKING:
    from bitwright.backends.gpu.runtime.program import GpuProgram

REPEATS = 20


def profile(program: GpuProgram, feeds: Mapping[str, Any], rounds: int) -> Profile:
    """Times by step; states do not change."""
    before = dict(program.states)
    seconds: dict[int, float] = {}
    whole = []
    for _ in range(max(rounds, 1)):
        for _ in range(3):
            begin = time.perf_counter()
            program.run(feeds)
            program.device.synchronize()
            whole.append(time.perf_counter() - begin)
        taken: dict[int, float] = {}
        bindings = program.run_steps(feeds, _timer(program, taken))
        for key, value in taken.items():
            seconds[key] = min(seconds.get(key, value), value)
    program.states.clear()
    program.states.update(before)
    steps = {id(step): step for step in program.schedule.steps}
    timed = tuple(TimedStep(steps[key], value) for key, value in seconds.items())
    run = min(whole)
    overhead = max(0.0, run - sum(seconds.values()))
    return Profile(timed, run, overhead, 0.0, 1, bindings)


def _timer(
    program: GpuProgram, seconds: dict[int, float]
) -> Callable[[Any, Callable[[], None]], None]:
    """A function that runs one step and records its time on the device."""
    device = program.device

    def around(step: Any, call: Callable[[], None]) -> None:
        if not device.is_interpreted and isinstance(step, KernelStep):
            call()
            seconds[id(step)] = _repeated(call)
            return
        device.synchronize()
        begin = time.perf_counter()
        call()
        device.synchronize()
        seconds[id(step)] = time.perf_counter() - begin

    return around


def _repeated(call: Callable[[], None]) -> float:
    """The time of one launch among REPEATS in a CUDA graph, where no launch waits for the host."""
    torch = load_torch()
    torch.cuda.synchronize()
    with captured() as graph:
        for _ in range(REPEATS):
            call()
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3 / REPEATS
