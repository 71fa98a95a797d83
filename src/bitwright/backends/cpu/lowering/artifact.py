"""The compiled artifact of a graph: everything a program needs to run it.

`lowering.build` makes it from a graph; `cache.artifact` reads it from a file.
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


class PendingObject(Protocol):
    """Object code that may still be compiling."""

    def result(self) -> bytes: ...


@dataclass(frozen=True)
class KernelCode:
    """A kernel: its signature and its object code."""

    name: str
    signature: Signature
    compiled: bytes | PendingObject = field(default=b"", compare=False)
    """Empty if all object code of the artifact came from a file."""

    @property
    def code(self) -> bytes:
        """The object code; waits for its compilation."""
        return self.compiled if isinstance(self.compiled, bytes) else self.compiled.result()


@dataclass(frozen=True)
class Fault:
    """The error report of an out-of-range index, or of a gradient that is not finite."""

    where: str
    indexed: TensorType | None
    parameter: str = ""
    """The parameter whose gradient is not finite; empty for an index."""


def new_fault_buffer() -> Buffer:
    """Two elements in which kernels record the node and the out-of-range index."""
    return Buffer("fault", i64, 2, Storage.STATE)


class Checks(Protocol):
    """Shape checks that depend on the sizes of a run."""

    def verify(self, bindings: Mapping[str, int]) -> None:
        """Raise a `RunError` if these sizes are inconsistent."""
        ...

    def ready(self, bindings: Mapping[str, int], seen: set[Node]) -> None:
        """`verify` for nodes whose sizes are all bound and that are not in `seen`."""
        ...


@dataclass(frozen=True)
class CompiledArtifact:
    schedule: Schedule
    kernels: Mapping[str, KernelCode]
    objects: Sequence[Any]
    """Object files; together they define every kernel."""
    fault_buffer: Buffer
    faults: Mapping[int, Fault]
    """By the number that kernels record (`Lowering.number`)."""
    checks: Checks
    is_planned: bool
    """Whether the inputs determine every size."""
    bodies: Mapping[str, Mapping[str, CompiledArtifact]] = field(default_factory=dict)
    """The artifacts of the bodies of control steps, by node name and attribute name."""

    @property
    def fallbacks(self) -> Iterator[InterpreterFallback]:
        """The interpreter fallbacks of the graph and of all bodies."""
        yield from self.schedule.fallbacks
        for bodies in self.bodies.values():
            for body in bodies.values():
                yield from body.fallbacks

    def warn_of_fallbacks(self) -> None:
        """Warn about each op without a kernel, once per process."""
        for step in self.fallbacks:
            warn_once(f"op {step.op.op}", f"runs in the reference interpreter: {step.why}")

    @property
    def nbytes(self) -> int:
        """Bytes of object code and constants."""
        held = sum(b.array.nbytes for b in self.schedule.buffers if b.array is not None)
        return held + sum(map(len, self.objects))
