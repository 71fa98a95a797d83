"""What a graph is lowered to: all that a program needs to run it.

`build` makes it from a graph; `stored` reads it from a file that an earlier process wrote.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from bitwright.backends.cpu.codegen.signature import Signature
from bitwright.ir.dtype import i64
from bitwright.ir.graph import Node
from bitwright.ir.types import TensorType
from bitwright.lir.buffer import Buffer, Storage
from bitwright.lir.schedule import InterpreterFallback, Schedule
from bitwright.warn import warn_once


class Making(Protocol):
    """Object code that may still be in the making."""

    def result(self) -> bytes: ...


@dataclass(frozen=True)
class KernelCode:
    """A kernel: the order of its slots, and its object code."""

    name: str
    signature: Signature
    made: bytes | Making = field(default=b"", compare=False)
    """Empty where the object code of all kernels came from a file."""

    @property
    def code(self) -> bytes:
        """The object code, once it is there."""
        return self.made if isinstance(self.made, bytes) else self.made.result()


@dataclass(frozen=True)
class Fault:
    """What is told of a node when one of its indices cannot be used."""

    where: str
    indexed: TensorType | None


def new_fault_buffer() -> Buffer:
    """Two cells in which kernels note the node and the index that they cannot use."""
    return Buffer("fault", i64, 2, Storage.STATE)


class Checks(Protocol):
    """What of the sizes of a run must be looked at again."""

    def verify(self, bindings: Mapping[str, int]) -> None: ...

    def ready(self, bindings: Mapping[str, int], seen: set[Node]) -> None: ...


@dataclass(frozen=True)
class CompiledArtifact:
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
    bodies: Mapping[str, Mapping[str, CompiledArtifact]] = field(default_factory=dict)
    """The code of the bodies of each control step, by the names of node and attribute."""

    @property
    def fallbacks(self) -> Iterator[InterpreterFallback]:
        """Those of the graph and of all bodies in it."""
        yield from self.schedule.fallbacks
        for bodies in self.bodies.values():
            for code in bodies.values():
                yield from code.fallbacks

    def warn_of_fallbacks(self) -> None:
        """Name what has no kernel, once in a process."""
        for step in self.fallbacks:
            warn_once(f"op {step.op.op}", f"runs in the reference interpreter: {step.why}")

    @property
    def nbytes(self) -> int:
        """Bytes of object code and constants."""
        held = sum(b.array.nbytes for b in self.schedule.buffers if b.array is not None)
        return held + sum(map(len, self.objects))
