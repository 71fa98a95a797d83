"""The steps of a profiled run with their operations, bytes, rates and roofline.

The time of a step comes from `Program.profile`, its operations from its node (`ops.core.flops`),
its bytes from its views (`report.traffic`), the peaks from measurements (`profile.peaks`). Its
roofline time is the longer of two: its operations at the arithmetic peak, and its bytes at the
bandwidth of the memory level that holds them. `reached` is the roofline time over the actual time.

If several steps compute one node, its operations are distributed over them by their time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bitwright.backends.base import Profile
from bitwright.backends.cpu.profile.peaks import Peaks
from bitwright.ir.graph import Graph, Node
from bitwright.ir.types import TensorType
from bitwright.lir.schedule import KernelStep, NodeStep, SizeStep, Step
from bitwright.ops.core.flops import flops
from bitwright.ops.core.opdef import Kind
from bitwright.ops.core.registry import get
from bitwright.report.traffic import Traffic, traffic

LOOKUPS = ("gather", "gather_elements", "gather_nd")
COPIES = ("copy_", "transpose", "pad", "interleave", "deinterleave")
SMALL_BARRIERS = 10
"""A step shorter than this many barriers is small: more threads gain little."""


@dataclass(frozen=True)
class StepRow:
    number: int
    node: str
    op: str
    """The op with its own loop nest, `elementwise`, or `copy` for layout changes."""
    fused: tuple[str, ...]
    """Ops computed in the same kernel."""
    kernel: str
    why: str
    traffic: Traffic
    operations: float | None
    integer: bool
    """Whether the operations are those of an integer product."""
    seconds: float
    share: float
    """Fraction of the time of all steps."""
    rate: float | None
    """Operations per second."""
    bytes_per_second: float
    reached: float | None
    """The roofline time over the actual time; None for interpreter fallbacks."""
    limit: str
    """compute, memory, small or interpreter."""

    @property
    def arithmetic(self) -> str:
        """Integer or float for a product; empty for other steps."""
        if not is_product(self.op):
            return ""
        return "integer" if self.integer else "float"

    def as_json(self) -> dict[str, Any]:
        moved = {"reads": self.traffic.reads, "writes": self.traffic.writes}
        return {**vars(self), "fused": list(self.fused), "traffic": moved}


def is_product(op: str) -> bool:
    return op not in ("elementwise", "copy", "sizes") and get(op).flops is not None


def step_rows(graph: Graph, found: Profile, peaks: Peaks) -> Iterator[StepRow]:
    """A row per step; `graph` is the final graph."""
    total = sum(timed.seconds for timed in found.steps) or 1.0
    own: dict[str, float] = {}
    for timed in found.steps:
        if not _is_copy(timed.step):
            own[timed.step.node] = own.get(timed.step.node, 0.0) + timed.seconds
    for number, timed in enumerate(found.steps):
        step, seconds = timed.step, timed.seconds
        node = _node(graph, step)
        op, fused = _ops(step, node)
        count: float | None = 0.0
        if node is not None and op != "copy":
            whole, part = flops(node, found.bindings), seconds / (own[step.node] or 1.0)
            count = None if whole is None else whole * part
        moved = traffic(step, found.bindings, op in LOOKUPS)
        integer = node is not None and is_product(op) and _is_integer(node)
        limit, reached = _limit(step, count, integer, moved, seconds, found, peaks)
        yield StepRow(
            number=number,
            node=step.node,
            op=op,
            fused=fused,
            kernel=step.family if isinstance(step, KernelStep) else "interpreter",
            why=getattr(step, "why", ""),
            traffic=moved,
            operations=count,
            integer=integer,
            seconds=seconds,
            share=seconds / total,
            rate=count / seconds if count is not None and seconds else None,
            bytes_per_second=moved.nbytes / seconds if seconds else 0.0,
            reached=reached,
            limit=limit,
        )


def _is_copy(step: Step) -> bool:
    """Whether a step only copies elements into another layout."""
    return isinstance(step, KernelStep) and step.family.startswith(COPIES)


def _node(graph: Graph, step: Step) -> Node | None:
    if isinstance(step, NodeStep):
        return step.op
    value = graph.values.get(step.node)
    return None if value is None else value.node


def _ops(step: Step, node: Node | None) -> tuple[str, tuple[str, ...]]:
    """The anchor op of a step, and the ops fused with it."""
    if isinstance(step, SizeStep):
        return "sizes", ()
    if _is_copy(step) or node is None or node.is_boundary:
        return "copy", ()
    if node.op != "fused":
        return node.op, ()
    inner = [n.op for n in node.attrs["body"].nodes if not n.is_boundary]
    anchor = next((op for op in inner if get(op).kind is not Kind.ELEMENTWISE), None)
    if anchor is None:
        return "elementwise", tuple(inner)
    inner.remove(anchor)
    return anchor, tuple(inner)


def _is_integer(node: Node) -> bool:
    """Whether the operands of a product are integers."""
    if node.op == "fused":
        body = node.attrs["body"].nodes
        node = next(n for n in body if not n.is_boundary and is_product(n.op))
    if node.attrs.get("int8"):
        return True
    types = [value.type for value in list(node.operands)[:2]]
    return all(isinstance(t, TensorType) and t.dtype.is_integer for t in types)


def _limit(
    step: Step,
    count: float | None,
    integer: bool,
    moved: Traffic,
    seconds: float,
    found: Profile,
    peaks: Peaks,
) -> tuple[str, float | None]:
    """The limit of a step, and its roofline time over its time."""
    if not isinstance(step, KernelStep):
        return "interpreter", None
    peak = (peaks.integers or peaks.flops) if integer else peaks.flops
    arithmetic = (count or 0) / peak
    movement = moved.nbytes / peaks.level(moved.nbytes).rate
    reached = max(arithmetic, movement) / seconds if seconds else None
    if seconds < SMALL_BARRIERS * found.barrier_seconds:
        return "small", reached
    return ("compute" if arithmetic >= movement else "memory"), reached
