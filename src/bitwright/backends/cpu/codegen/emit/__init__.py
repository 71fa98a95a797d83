"""Our own builder of LLVM's assembly text: typed values, Python operators, structured control flow.

Start reading at `function.Function`; `module.Module` collects functions into a text that `jit`
compiles. Nothing here imports llvmlite.
"""

from bitwright.backends.cpu.codegen.emit.core import Operand, Value
from bitwright.backends.cpu.codegen.emit.function import Function, Kernel
from bitwright.backends.cpu.codegen.emit.module import Module
from bitwright.backends.cpu.codegen.emit.types import (
    Type,
    bf16,
    computed,
    f16,
    f32,
    f64,
    i1,
    i8,
    i16,
    i32,
    i64,
    ptr,
    stored,
    void,
)
from bitwright.backends.cpu.codegen.signature import SLOT_BYTES, Signature, Slot

__all__ = [
    "SLOT_BYTES",
    "Function",
    "Kernel",
    "Module",
    "Operand",
    "Signature",
    "Slot",
    "Type",
    "Value",
    "bf16",
    "computed",
    "f16",
    "f32",
    "f64",
    "i1",
    "i8",
    "i16",
    "i32",
    "i64",
    "ptr",
    "stored",
    "void",
]
