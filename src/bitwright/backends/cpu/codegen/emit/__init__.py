"""A builder for LLVM assembly text: typed values, Python operators, structured control flow.

The entry points are `function.Function` and `module.Module`, which collects functions into the text
that `jit` compiles. Nothing here imports llvmlite.
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
    storage_type,
    void,
)
from bitwright.backends.cpu.codegen.signature import SLOT_BYTES, Signature, Slot

__all__ = [
    "SLOT_BYTES", "Function", "Kernel", "Module", "Operand", "Signature", "Slot", "Type", "Value",
    "bf16", "computed", "f16", "f32", "f64", "i1", "i8", "i16", "i32", "i64", "ptr", "storage_type",
    "void",
]  # fmt: skip
