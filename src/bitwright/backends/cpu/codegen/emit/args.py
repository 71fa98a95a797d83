"""The arguments of a kernel as emitted values (`signature` defines the slots)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bitwright.backends.cpu.codegen.emit.core import Value
from bitwright.backends.cpu.codegen.emit.types import Type, f32, i64, ptr
from bitwright.backends.cpu.codegen.signature import SLOT_BYTES, Signature

if TYPE_CHECKING:
    from bitwright.backends.cpu.codegen.emit.function import Function


class Arguments:
    """The slots as values; each is loaded once, in the entry block."""

    def __init__(self, f: Function, table: Value, signature: Signature) -> None:
        self._f, self._table, self.signature = f, table, signature
        self._read: dict[str, Value] = {}

    def pointer(self, name: str) -> Value:
        return self._slot(name, "pointer", ptr)

    def size(self, name: str) -> Value:
        return self._slot(name, "size", i64)

    def scalar(self, name: str, type_: Type = f32) -> Value:
        return self._slot(name, type_.mangled, type_)

    def _slot(self, name: str, kind: str, type_: Type) -> Value:
        if name not in self._read:
            f = self._f
            offset = self.signature.position(name, kind) * SLOT_BYTES
            address = f.emit_prologue(
                ptr, f"getelementptr inbounds i8, ptr {self._table.text}, i64 {offset}"
            )
            self._read[name] = f.emit_prologue(
                type_,
                f"load {type_.text}, ptr {address.text}, align 8, "
                f"!invariant.load {f.module.empty_metadata}",
            )
        return self._read[name]
