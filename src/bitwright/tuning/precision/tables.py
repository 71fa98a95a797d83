"""Times and predicted errors of every unit in every precision, and what follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bitwright.ir.dim import evaluate
from bitwright.ir.graph import Graph
from bitwright.ir.types import TensorType
from bitwright.tuning.precision import assignment
from bitwright.tuning.precision.assignment import Assignment, Glue, Option
from bitwright.tuning.precision.precisions import FLOAT, LAYOUTS, weight_bytes
from bitwright.tuning.precision.step_times import VariantTimes
from bitwright.tuning.precision.units import Unit, neighbours

DEFAULT_BOUNDARY = 0.25e-9
"""Seconds per element of a quantize step, if no variant has one."""
MAX_RUNGS = 48
SIGNIFICANT = 0.01
"""The fraction of the time that a precision must save somewhere to be considered."""


@dataclass
class Tables:
    """The recorded facts that assignments depend on."""

    units: list[Unit]
    times: dict[str, VariantTimes] = field(default_factory=dict)
    """By precision."""
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    """Error energy by precision and unit."""
    available: dict[str, list[str]] = field(default_factory=dict)
    """The units that a precision is possible for."""
    boundary: float = DEFAULT_BOUNDARY
    """Seconds per element between units of unlike layout."""

    def seconds(self, unit: str, precision: str) -> float | None:
        times = self.times.get(precision)
        if times is None or unit not in self.available.get(precision, ()):
            return None
        return times.units.get(unit, 0.0)

    def options(self, unit: Unit) -> dict[str, dict[str, float | None]]:
        """Seconds and error by precision, for reports."""
        found: dict[str, dict[str, float | None]] = {}
        for precision in self.times:
            seconds = self.seconds(unit.name, precision)
            if seconds is not None:
                error = self.errors.get(precision, {}).get(unit.name)
                found[precision] = {"seconds": seconds, "error": error}
        return found

    def matters(self, precision: str) -> bool:
        """Whether a precision would make the fastest assignment faster by more than noise."""
        gain = total = 0.0
        for unit in self.units:
            own = self.seconds(unit.name, precision)
            found = (self.seconds(unit.name, name) for name in self.times if name != precision)
            least = min((seconds for seconds in found if seconds is not None), default=0.0)
            total += least
            if own is not None and unit.kind != "lookup":
                gain += max(0.0, least - own)
        return gain > SIGNIFICANT * total

    def costs(self, objective: str) -> dict[str, dict[str, Option]]:
        """The options of the assignment problem."""
        table: dict[str, dict[str, Option]] = {}
        for unit in self.units:
            options: dict[str, Option] = {}
            for precision in self.times:
                seconds = self.seconds(unit.name, precision)
                error = self.errors.get(precision, {}).get(unit.name)
                if seconds is None or (error is None and precision != FLOAT):
                    continue
                cost = seconds if objective == "latency" else weight_bytes(unit, precision)
                options[precision] = Option(cost, 0.0 if precision == FLOAT else float(error or 0))
            if options:
                table[unit.name] = options
        return table

    def glue(self, graph: Graph, objective: str) -> list[Glue]:
        """Costs between units of unlike layout."""
        if objective != "latency":
            return []
        bindings = self.times[FLOAT].bindings
        # attention and lookups have f32 neighbours in every variant, so their times contain that
        open_ = {unit.name for unit in self.units if unit.kind in ("product", "body")}
        found = []
        for first, second, name in neighbours(graph, self.units):
            value = graph.values.get(name) if {first, second} <= open_ else None
            if value is None or not isinstance(value.type, TensorType):
                continue
            try:
                count = float(evaluate(value.tensor.count, bindings))
            except KeyError:
                continue  # a size that the run does not bind
            found.append(Glue(first, second, self.boundary * count))
        return found

    def boundary_elements(
        self, graph: Graph, objective: str, precisions: Mapping[str, str]
    ) -> float:
        """Elements between units of unlike layout."""
        glue = [g for g in self.glue(graph, objective) if {g.first, g.second} <= precisions.keys()]
        paid = sum(one.cost for one in glue if assignment.is_paid(one, precisions, LAYOUTS))
        return paid / self.boundary if self.boundary else 0.0

    def measured_boundary(self) -> float:
        """Seconds per element of steps that only quantize, over all variants."""
        seconds = sum(one.boundary_seconds for one in self.times.values())
        elements = sum(one.boundary_elements for one in self.times.values())
        return seconds / elements if elements else DEFAULT_BOUNDARY

    def ladder(self, graph: Graph, objective: str) -> list[Assignment]:
        """Non-dominated assignments by increasing error and decreasing cost."""
        table = self.costs(objective)
        if not table:
            return []
        glue = [g for g in self.glue(graph, objective) if g.first in table and g.second in table]
        kept: list[Assignment] = []
        for one in assignment.front(table, glue, LAYOUTS, most=MAX_RUNGS):
            if not kept or one.cost < kept[-1].cost:
                kept.append(one)
        return kept

    def evaluate(
        self, graph: Graph, objective: str, precisions: Mapping[str, str]
    ) -> Assignment | None:
        """Predicted cost and error of given precisions; None if one of them is not in the table."""
        table = self.costs(objective)
        if any(precisions.get(unit) not in options for unit, options in table.items()):
            return None
        glue = [g for g in self.glue(graph, objective) if g.first in table and g.second in table]
        return assignment.evaluate(table, {u: precisions[u] for u in table}, glue, LAYOUTS)
