"""What a graph is lowered to: all that a program needs to run it.

`build` makes it from a graph; `stored` reads it from a file that an earlier process wrote.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from bitwright.ir.graph import Node
from bitwright.ir.types import TensorType
from bitwright.lir.buffer import Buffer
from bitwright.lir.schedule import Schedule

if TYPE_CHECKING:
    from bitwright.backends.cpu.lowering import KernelCode


@dataclass(frozen=True)
class Fault:
    """What is told of a node when one of its indices cannot be used."""

    where: str
    indexed: TensorType | None


class Checks(Protocol):
    """What of the sizes of a run must be looked at again."""

    def verify(self, bindings: Mapping[str, int]) -> None: ...

    def ready(self, bindings: Mapping[str, int], seen: set[Node]) -> None: ...


@dataclass(frozen=True)
class Code:
    schedule: Schedule
    kernels: Mapping[str, KernelCode]
    objects: Sequence[Any]
    """Object code as bytes; together it holds every kernel."""
    fault_buffer: Buffer
    faults: Mapping[int, Fault]
    """By the number that kernels note (`Lowering.number`)."""
    checks: Checks
    is_planned: bool
    """Whether the inputs fix every size."""
