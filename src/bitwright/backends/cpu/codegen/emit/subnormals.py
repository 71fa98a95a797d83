"""Treating subnormal numbers as zeros for the duration of a kernel.

with module.kernel(name, signature) as f, f.subnormals_as_zeros():
    ...

A product with a subnormal operand or result takes a hundred cycles or more on many processors, and
a trained network can hold thousands of such weights. Kernels that sum products therefore treat them
as zeros, which changes a sum by less than 2^-126 per term; integer sums are exact, and their scaled
results are flushed in the same way. The kernel restores the thread's setting when it ends;
elementwise kernels follow IEEE 754 fully. Targets without such a mode compute with subnormals.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bitwright.backends.cpu.codegen.emit.memory import Memory
from bitwright.backends.cpu.codegen.emit.types import i32, i64

# x86 MXCSR: flush results (bit 15) and operands (bit 6); AArch64 FPCR: one bit for both
_MXCSR_ZEROS = 1 << 15 | 1 << 6
_FPCR_ZEROS = 1 << 24


class Subnormals(Memory):
    @contextmanager
    def subnormals_as_zeros(self) -> Iterator[None]:
        """Wraps a whole kernel; called functions inherit the mode."""
        self.flushes = self.target.is_x86 or self.target.architecture == "aarch64"
        if self.target.is_x86:
            before, within = self.scratch(i32, 1), self.scratch(i32, 1)
            self.intrinsic_void("llvm.x86.sse.stmxcsr", before)
            self.store(self.or_(self.load(i32, before), _MXCSR_ZEROS), within)
            self.intrinsic_void("llvm.x86.sse.ldmxcsr", within)
            yield
            self.intrinsic_void("llvm.x86.sse.ldmxcsr", before)
        elif self.target.architecture == "aarch64":
            setting = self.intrinsic("llvm.aarch64.get.fpcr", i64)
            self.intrinsic_void("llvm.aarch64.set.fpcr", self.or_(setting, _FPCR_ZEROS))
            yield
            self.intrinsic_void("llvm.aarch64.set.fpcr", setting)
        else:
            yield
