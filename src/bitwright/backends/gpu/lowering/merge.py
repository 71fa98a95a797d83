"""Merges adjacent small kernels that do not need each other into one launch.

A launch takes longer than the work on a few thousand elements. The programs of a merged kernel are
those of its parts, one part after the other; every part is a function of the kernel, called with
its own program index.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from bitwright.backends.gpu.codegen.source import Config, KernelSource, Work
from bitwright.ir.dim import Size
from bitwright.ir.dtype import DType
from bitwright.lir.buffer import View
from bitwright.lir.schedule import KernelStep, Step

MOST_PROGRAMS = 256
"""Of a part: about what one wave of a device is."""
MOST_PARTS = 4
_PROGRAM = re.compile(r"tl\.program_id\((\d)\)")


@dataclass(frozen=True)
class _Part:
    step: KernelStep
    source: KernelSource
    grid: tuple[int, ...]

    @property
    def config(self) -> Config:
        return self.source.configs[0]

    def fits(self, others: Sequence[_Part]) -> bool:
        """Whether the part may run beside others: same warps, nothing one needs of another."""
        mine = {*self.step.reads, *self.step.writes}
        for other in others:
            if (self.config.num_warps, self.source.contracts) != (
                other.config.num_warps,
                other.source.contracts,
            ):
                return False
            theirs = {*other.step.reads, *other.step.writes}
            if not mine.isdisjoint(other.step.writes) or not theirs.isdisjoint(self.step.writes):
                return False
        return True


def merge_small(
    steps: Iterable[Step], sources: Mapping[str, KernelSource]
) -> tuple[list[Step], dict[str, KernelSource]]:
    """The steps with small ones merged, and the sources of new kernels."""
    found: list[Step] = []
    made: dict[str, KernelSource] = {}
    group: list[_Part] = []

    def close() -> None:
        if len(group) > 1:
            step, source = _merged(group)
            made[source.name] = source
            found.append(step)
        else:
            found.extend(part.step for part in group)
        group.clear()

    for step in steps:
        part = _part(step, sources)
        if part is None:
            close()
            found.append(step)
            continue
        if len(group) == MOST_PARTS or not part.fits(group):
            close()
        group.append(part)
    close()
    return found, made


def _part(step: Step, sources: Mapping[str, KernelSource]) -> _Part | None:
    """A step that can be merged: a small grid of known size, one text for all devices."""
    if not isinstance(step, KernelStep):
        return None
    source = sources[step.kernel]
    if not all(isinstance(size, int) for size in step.sizes.values()):
        return None
    if source.descriptors or source.native_body or source.early or "num_programs" in source.body:
        return None
    grid = tuple(source.grid({**step.sizes, **source.configs[0].constants}))  # type: ignore[dict-item]
    return _Part(step, source, grid) if 0 < prod(grid) <= MOST_PROGRAMS else None


def _merged(parts: Sequence[_Part]) -> tuple[KernelStep, KernelSource]:
    functions: list[str] = []
    calls: list[str] = []
    pointers: dict[str, View] = {}
    types: dict[str, DType] = {}
    sizes: dict[str, Size] = {}
    begin = 0
    for number, part in enumerate(parts):
        own = part.source
        prefix = f"p{number}_"
        pointers |= {prefix + name: view for name, view in part.step.pointers.items()}
        types |= {prefix + name: dtype for name, dtype in own.pointers.items()}
        sizes |= {prefix + name: size for name, size in part.step.sizes.items()}
        functions += [own.helpers.strip("\n")] if own.helpers else []
        functions.append(_function(own, number))
        x, y = (*part.grid, 1)[:2]
        places = (f"at % {x}", f"(at // {x}) % {y}", f"at // {x * y}")
        given = [prefix + name for name in (*own.pointers, *own.sizes)]
        given += [str(value) for value in part.config.constants.values()]
        end = begin + prod(part.grid)
        calls += [
            f"{'if' if not number else 'elif'} program < {end}:"
            if end and number < len(parts) - 1
            else "else:",
            f"    at = program - {begin}",
            f"    part{number}({', '.join([*given, *places])})",
        ]
        begin = end
    constants = {"UNUSED": 1}
    source = KernelSource(
        "merged_" + "_".join(dict.fromkeys(part.step.family for part in parts)),
        "\n".join(["program = tl.program_id(0)", *calls]),
        types,
        tuple(sizes),
        (Config(constants, parts[0].config.num_warps, 1),),
        lambda size, count=begin: (count,),  # type: ignore[misc]
        contracts=parts[0].source.contracts,
        work=Work(),
        helpers="\n\n".join(dict.fromkeys(functions)),
    )
    steps = [part.step for part in parts]
    reads = dict.fromkeys(buffer for step in steps for buffer in step.reads)
    writes = dict.fromkeys(buffer for step in steps for buffer in step.writes)
    why = f"{len(parts)} small kernels in one launch: {', '.join(step.node for step in steps)}"
    step = KernelStep(source.name, steps[0].node, pointers, sizes, tuple(reads), tuple(writes), why)
    return step, source


def _function(source: KernelSource, number: int) -> str:
    """A kernel's body as a function that gets its program index."""
    body = textwrap.dedent(source.body).strip("\n")
    body = _PROGRAM.sub(lambda m: "program_" + "xyz"[int(m.group(1))], body)
    arguments = [*source.pointers, *source.sizes, *(f"{c}: tl.constexpr" for c in source.constants)]
    arguments += [f"program_{axis}" for axis in "xyz"]
    head = f"@triton.jit\ndef part{number}({', '.join(arguments)}):\n"
    return head + textwrap.indent(body, "    ")
