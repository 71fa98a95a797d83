"""A module: functions, declarations of intrinsics, constant tables; rendered as LLVM text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bitwright.backends.cpu.codegen.emit.core import Value
from bitwright.backends.cpu.codegen.emit.function import Function, Kernel
from bitwright.backends.cpu.codegen.emit.types import Type, constant, ptr, void
from bitwright.backends.cpu.codegen.signature import Signature
from bitwright.errors import CompileError
from bitwright.target import Target

# nounwind: no exceptions. no-builtins: LLVM must not turn a copy loop into a call to memcpy, so the
# code needs no C library.
_ATTRIBUTES = 'nounwind "no-builtins" "no-trapping-math"="true"'


class Module:
    empty_metadata, one_metadata = "!0", "!1"

    def __init__(self, target: Target, name: str = "module") -> None:
        self.target, self.name = target, name
        self.functions: dict[str, str] = {}
        self.signatures: dict[str, Signature] = {}
        """The slots of each kernel by name."""
        self._declared: dict[str, str] = {}
        self._tables: dict[bytes, str] = {}
        self._globals: list[str] = []

    def kernel(self, name: str, signature: Signature) -> Kernel:
        """Begin a kernel (`codegen.emit.function` shows an example)."""
        self.signatures[name] = signature
        return Kernel(self, name, signature)

    def function(
        self,
        name: str,
        result: Type = void,
        params: Sequence[tuple[str, Type]] = (),
        *,
        attributes: Sequence[str] = (),
        internal: bool = True,
        inline: bool = False,
    ) -> Function:
        """Begin a function; `internal` limits it to this module, `inline` inlines it always."""
        return Function(
            self, name, result, params, attributes=attributes, internal=internal, inline=inline
        )

    def add(self, function: Function) -> None:
        if function.name in self.functions:
            raise CompileError(f"two functions are named {function.name!r}", where=self.name)
        self.functions[function.name] = function.text()

    def declare(self, name: str, text: str) -> None:
        """Declare an intrinsic."""
        self._declared.setdefault(name, text)

    def table(self, f: Function, scalar: Type, numbers: Any, align: int = 64) -> Value:
        """The address of a constant table in the module's read-only data."""
        array = np.asarray(numbers)
        key = scalar.mangled.encode() + array.tobytes()
        if key not in self._tables:
            self._tables[key] = name = f"@table{len(self._tables)}"
            body = ", ".join(f"{scalar.text} {constant(scalar, n)}" for n in array.tolist())
            self._globals.append(
                f"{name} = private unnamed_addr constant [{array.size} x {scalar.text}] "
                f"[{body}], align {align}"
            )
        return Value(f, ptr, self._tables[key])

    def text(self) -> str:
        """The module as LLVM assembly; equal calls give equal text."""
        triple = f'target triple = "{self.target.triple}"'
        body = (*self._globals, *self.functions.values(), *self._declared.values())
        attributes = f"attributes #0 = {{ {_ATTRIBUTES} }}"
        return "\n".join([triple, *body, attributes, "!0 = !{}", "!1 = !{i32 1}", ""])
