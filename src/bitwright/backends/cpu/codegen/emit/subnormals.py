"""Numbers below the smallest normal one, as zeros, for the length of a kernel.

with module.kernel(name, signature) as f, f.subnormals_as_zeros():
    ...

A product with a subnormal operand or result takes a hundred cycles and more on many processors,
and a trained network can hold thousands of such weights. Kernels that sum products therefore read
and write them as zeros, which moves a sum by less than 2^-126 a term; sums of codes are exact, and
what they are scaled to is read and written in the same way. The calling thread's own
setting is back in force when the kernel ends; elementwise kernels keep the whole of IEEE. A target
without such a switch computes with subnormals.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bitwright.backends.cpu.codegen.emit.arithmetic import Arithmetic
from bitwright.backends.cpu.codegen.emit.memory import Memory
from bitwright.backends.cpu.codegen.emit.types import i32, i64

# x86's MXCSR: results (bit 15) and operands (bit 6); AArch64's FPCR: both by one bit
_MXCSR_ZEROS = 1 << 15 | 1 << 6
_FPCR_ZEROS = 1 << 24


class Subnormals(Arithmetic, Memory):
    @contextmanager
    def subnormals_as_zeros(self) -> Iterator[None]:
        """Around a whole kernel; what it calls runs under the same setting."""
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
