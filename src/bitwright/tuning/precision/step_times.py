"""The time of each unit in a compiled variant of the model.

Every step of a run counts to one unit, so the times of a variant's units add up to the time of its
steps. A step's node keeps the name of a value of the float graph, with suffixes
(`relu_1.quantized`), or it gets the unit of the nodes that read it (a dynamic quantize), or of
those that it reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bitwright.backends.base import Profile
from bitwright.executable import Executable
from bitwright.ir.dim import evaluate
from bitwright.ir.graph import Graph, Node

REST = ""
"""The unit of steps that belong to none."""
_QUANTIZES = ("quantize", "dynamic_quantize")
_CHEAP = ("add", "cast", "clip", "mul")


@dataclass
class VariantTimes:
    """Seconds by unit, the minimum over rounds."""

    units: dict[str, float] = field(default_factory=dict)
    run_seconds: float = float("inf")
    """The whole run, measured by the caller."""
    overhead_seconds: float = 0.0
    """The time of a run outside of its steps."""
    boundary_seconds: float = 0.0
    """Steps that only quantize."""
    boundary_elements: float = 0.0
    bindings: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


def profile_variant(
    exe: Executable, feeds: Mapping[str, Any], owner: Mapping[str, str], rounds: int
) -> VariantTimes:
    """Times of a compiled model by unit."""
    found: Profile = exe.engine.profile(feeds, rounds)
    final: Graph = exe.engine.graph  # type: ignore[attr-defined]
    homes = _Homes(final, owner)
    times = VariantTimes(
        run_seconds=found.run_seconds,
        overhead_seconds=found.overhead_seconds,
        bindings=dict(found.bindings),
    )
    for timed in found.steps:
        unit = homes.of(timed.step.node)
        times.units[unit] = times.units.get(unit, 0.0) + timed.seconds
        value = final.values.get(timed.step.node)
        if value is not None and _only_quantizes(value.node):
            times.boundary_seconds += timed.seconds
            times.boundary_elements += _elements(value.node, found.bindings)
    return times


def merged(one: VariantTimes, other: VariantTimes) -> VariantTimes:
    """The minimum of two measurements of the same variant."""
    names = dict.fromkeys((*one.units, *other.units))
    units = {n: min(one.units.get(n, 1e9), other.units.get(n, 1e9)) for n in names}
    return VariantTimes(
        units,
        min(one.run_seconds, other.run_seconds),
        min(one.overhead_seconds, other.overhead_seconds),
        min(one.boundary_seconds, other.boundary_seconds),
        one.boundary_elements,
        one.bindings,
    )


class _Homes:
    """Finds the unit of a node of the final graph."""

    def __init__(self, final: Graph, owner: Mapping[str, str]) -> None:
        self._final, self._owner = final, owner
        self._readers: dict[str, list[Node]] = {}
        for node in final.nodes:
            for value in node.operands:
                self._readers.setdefault(value.name, []).append(node)

    def of(self, name: str) -> str:
        if (found := self._by_name(name)) is not None:
            return found
        value = self._final.values.get(name)
        if value is None:
            return REST
        return self._nearest(value.node, forward=True) or self._nearest(value.node, False) or REST

    def _by_name(self, name: str) -> str | None:
        while name:
            if name in self._owner:
                return self._owner[name]
            name = name.rpartition(".")[0]
        return None

    def _nearest(self, start: Node, forward: bool) -> str | None:
        """The unit of the nearest node with a known name, in one direction."""
        level, seen = [start], {start}
        while level:
            after: list[Node] = []
            for node in level:
                if forward:
                    near = [r for name in node.names for r in self._readers.get(name, ())]
                else:
                    near = [value.node for value in node.operands if not value.is_constant]
                after += [one for one in near if one not in seen]
                seen.update(near)
            for node in after:
                for name in node.names:
                    if (found := self._by_name(name)) is not None:
                        return found
            level = after
        return None


def _only_quantizes(node: Node) -> bool:
    if node.op == "fused":
        inner = [n.op for n in node.attrs["body"].nodes if not n.is_boundary]
        return bool(set(inner) & set(_QUANTIZES)) and set(inner) <= {*_QUANTIZES, *_CHEAP}
    return node.op in _QUANTIZES


def _elements(node: Node, bindings: Mapping[str, int]) -> float:
    return float(evaluate(node.outputs[0].tensor.count, bindings))
