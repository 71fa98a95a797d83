"""Parameters of kernels that change their speed and no bits: tiles, cache blocks.

A lowering asks for one of several candidates. The first is the static choice, made from facts about
the target. `bw.tune_kernels` measures the others on this machine; what was faster is remembered in
the cache folder and replaces the static choice in later compilations:

    tile, block = ctx.choices.pick(node, "matmul_f32 columns=384 depth=384", forms)

Candidates must give the same bits.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar

from bitwright import knobs
from bitwright.backends.cpu.cache.objects import default_cache, hash_parts, key
from bitwright.ir.graph import Node
from bitwright.target import Target

T = TypeVar("T")
_ENTRY = "tuned kernel parameters"


@dataclass
class Point:
    """A choice that a lowering made: its candidates, the static one first, and its nodes."""

    candidates: tuple[str, ...]
    nodes: list[str] = field(default_factory=list)


class Choices:
    """Chosen candidates by point, and the points that were asked for."""

    def __init__(self, chosen: Mapping[str, str] | None = None) -> None:
        self.chosen = dict(chosen or {})
        self.points: dict[str, Point] = {}

    def pick(self, node: Node, point: str, candidates: Mapping[str, T]) -> T:
        """The chosen candidate of a point, else the first."""
        asked = self.points.setdefault(point, Point(tuple(candidates)))
        asked.nodes.append(node.name)
        return candidates.get(self.chosen.get(point, ""), next(iter(candidates.values())))


_ACTIVE: ContextVar[Choices | None] = ContextVar("choices", default=None)


def active(target: Target) -> Choices:
    """The choices of the compilation at hand: those of `using`, else the remembered ones."""
    found = _ACTIVE.get()
    return Choices(remembered(target)) if found is None else found


@contextmanager
def using(choices: Choices) -> Iterator[Choices]:
    """Compile with these choices."""
    token = _ACTIVE.set(choices)
    try:
        yield choices
    finally:
        _ACTIVE.reset(token)


def remembered(target: Target) -> dict[str, str]:
    """The candidates that were measured to be fastest on this machine, by point."""
    if knobs.TUNED.get() == "off":
        return {}
    data = default_cache().read_entry(key(_ENTRY, target))
    try:
        found = json.loads(data or b"{}")
    except ValueError:
        return {}
    if not isinstance(found, dict):
        return {}
    return {k: v for k, v in found.items() if isinstance(v, str)}


def remember(target: Target, chosen: Mapping[str, str]) -> None:
    """Replace what is remembered for a target."""
    data = json.dumps(dict(sorted(chosen.items())))
    default_cache().write_entry(key(_ENTRY, target), data.encode())


def digest(target: Target) -> str:
    """Identifies what is remembered: part of the key of compiled models."""
    found = sorted(remembered(target).items())
    return hash_parts(part for pair in found for part in pair) if found else ""
