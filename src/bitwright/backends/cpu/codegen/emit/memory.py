"""Loads and stores: plain, masked, gathered, atomic; addresses and scratch memory.

    x = f.load(f32x16, p, i)                     # element i of p, as 16 floats
    f.store(y, p, i, mask=f.mask(left, 16))      # writes only the first `left` lanes

An index counts elements of the type's scalar. Without `align`, only the scalar's alignment is
assumed; unaligned instructions are as fast on addresses that are in fact aligned.
"""

from __future__ import annotations

from bitwright.backends.cpu.codegen.emit.control import Control
from bitwright.backends.cpu.codegen.emit.convert import Conversions
from bitwright.backends.cpu.codegen.emit.core import Operand, Value
from bitwright.backends.cpu.codegen.emit.types import Type, bf16, f16, i1, i8, i16, i32, i64, ptr
from bitwright.errors import CompileError


class Memory(Conversions, Control):
    # addresses

    def offset(self, pointer: Value, count: Operand) -> Value:
        """The pointer plus `count` bytes."""
        return self.gep(i8, pointer, count)

    def distance(self, start: Value, end: Value) -> Value:
        """Bytes from one pointer to another."""
        places = [self.emit(i64, f"ptrtoint ptr {p.text} to i64") for p in (start, end)]
        return self.emit(i64, f"sub i64 {places[1].text}, {places[0].text}")

    def gep(self, type_: Type, pointer: Value, index: Operand) -> Value:
        """The address of element `index` of an array of the type's scalar."""
        if not isinstance(index, Value) and index == 0:
            return pointer
        index = self.index(index)
        return self._address(ptr, type_, pointer, index)

    def _address(self, result: Type, type_: Type, pointer: Value, index: Value) -> Value:
        operands = self.listed((pointer, index))
        return self.emit(result, f"getelementptr inbounds {type_.scalar.text}, {operands}")

    def scratch(self, type_: Type, count: int, align: int = 64) -> Value:
        """Stack memory of the calling thread, valid until the kernel returns (keep it small)."""
        return self.emit_prologue(ptr, f"alloca [{count} x {type_.text}], align {align}")

    # plain and masked

    def load(
        self,
        type_: Type,
        pointer: Value,
        index: Operand = 0,
        *,
        mask: Value | None = None,
        default: Operand = 0,
        align: int = 0,
        invariant: bool = False,
    ) -> Value:
        """Load a scalar or vector.

        Lanes outside `mask` are not accessed and read as `default`. `invariant` guarantees that
        nothing writes this memory while the kernel runs, so LLVM may move the load.
        """
        address = self.gep(type_, pointer, index)
        if mask is not None:
            return self._masked_load(type_, address, mask, default, align)
        if type_.scalar is bf16:  # LLVM would call a library function for this type
            bits = self.load(type_.of(i16), address, align=align, invariant=invariant)
            return self.bitcast(bits, type_)
        tag = f", !invariant.load {self.module.empty_metadata}" if invariant else ""
        return self.emit(
            type_, f"load {type_.text}, ptr {address.text}, align {align or type_.bytes}{tag}"
        )

    def store(
        self,
        value: Value,
        pointer: Value,
        index: Operand = 0,
        *,
        mask: Value | None = None,
        align: int = 0,
        stream: bool = False,
    ) -> None:
        """Store a scalar or vector; lanes outside `mask` are unchanged.

        `stream` is a non-temporal store, for large results that are not read soon; it requires
        `align` to be the vector's size.
        """
        address = self.gep(value.type, pointer, index)
        if mask is not None:
            self._masked_store(value, address, mask, align)
            return
        if value.type.scalar is bf16:
            value = self.bitcast(value, value.type.of(i16))
        tag = f", !nontemporal {self.module.one_metadata}" if stream else ""
        align = align or value.type.bytes
        self.emit_void(f"store {self.listed((value, address))}, align {align}{tag}")

    def _masked_load(
        self, type_: Type, address: Value, mask: Value, default: Operand, align: int
    ) -> Value:
        if type_.lanes == 1:
            with self.if_(mask, carry=(self.as_value(default, type_),)) as branch:
                branch.next(self.load(type_, address, align=align))
            return branch.results[0]
        if type_.scalar in (f16, bf16):
            whole = self.as_value(default, type_)
            bits = self._masked_load(
                type_.of(i16), address, mask, self.bitcast(whole, type_.of(i16)), align
            )
            return self.bitcast(bits, type_)
        whole = self.as_value(default, type_)
        if not self._masks_well(type_, reads=True) and mask.text not in self.partial_masks:
            with self.if_(self.all(mask), carry=(whole,)) as branch:
                branch.next(self.load(type_, address, align=align))
            with branch.else_():
                branch.next(self._masked(type_, address, mask, whole, align))
            return branch.results[0]
        return self._masked(type_, address, mask, whole, align)

    def _masked(
        self, type_: Type, address: Value, mask: Value, default: Value, align: int
    ) -> Value:
        source = f"ptr align {align or type_.bytes} {address.text}"
        operands = (source, self.listed([mask]), self.listed([default]))
        return self.emit(type_, self._call_masked("load", type_, type_.text, *operands))

    def _masks_well(self, type_: Type, reads: bool) -> bool:
        """Whether a masked load or store is about as fast as an unmasked one.

        AVX2 masks lanes of at least 32 bits: its masked loads are fast, its masked stores take tens
        of micro-ops on AMD processors. Other cases become a branch per lane.
        """
        target = self.target
        if not target.is_x86:
            return False
        if type_.scalar.bytes < 4:
            return target.has("avx512bw")
        return target.has("avx512f") or (reads and target.has("avx"))

    def _masked_store(self, value: Value, address: Value, mask: Value, align: int) -> None:
        type_ = value.type
        if type_.lanes == 1:
            with self.if_(mask):
                self.store(value, address, align=align)
            return
        if type_.scalar in (f16, bf16):
            self._masked_store(self.bitcast(value, type_.of(i16)), address, mask, align)
            return
        if not self._masks_well(type_, reads=False) and mask.text not in self.partial_masks:
            with self.if_(self.all(mask)) as branch:
                self.store(value, address, align=align)
            with branch.else_():
                self._write_masked(value, address, mask, align)
            return
        self._write_masked(value, address, mask, align)

    def _write_masked(self, value: Value, address: Value, mask: Value, align: int) -> None:
        type_ = value.type
        target = f"ptr align {align or type_.bytes} {address.text}"
        operands = (self.listed([value]), target, self.listed([mask]))
        self.emit_void(self._call_masked("store", type_, "void", *operands))

    def _call_masked(self, kind: str, type_: Type, result: str, *operands: str) -> str:
        addresses = f"v{type_.lanes}p0" if kind in ("gather", "scatter") else "p0"
        name = f"llvm.masked.{kind}.{type_.mangled}.{addresses}"
        types = ", ".join(_type_of(operand) for operand in operands)
        self.module.declare(name, f"declare {result} @{name}({types})")
        return f"call {result} @{name}({', '.join(operands)})"

    def gather(
        self,
        type_: Type,
        pointer: Value,
        indices: Value,
        *,
        mask: Value | None = None,
        default: Operand = 0,
    ) -> Value:
        """Gather one scalar per index (a vector of i32 or i64, in elements)."""
        if type_.lanes == 1:
            single = self.convert(indices, i64)
            return self.load(type_, pointer, single, mask=mask, default=default)
        if type_.scalar in (f16, bf16):  # LLVM would ignore the mask for half types
            whole = self.bitcast(self.as_value(default, type_), type_.of(i16))
            bits = self.gather(type_.of(i16), pointer, indices, mask=mask, default=whole)
            return self.bitcast(bits, type_)
        addresses, mask = self._addresses(type_, pointer, indices, mask)
        operands = (addresses, self.listed([mask]), self.listed([self.as_value(default, type_)]))
        return self.emit(type_, self._call_masked("gather", type_, type_.text, *operands))

    def scatter(
        self, value: Value, pointer: Value, indices: Value, *, mask: Value | None = None
    ) -> None:
        """Scatter each lane to its index; for equal indices the highest lane wins."""
        type_ = value.type
        if type_.lanes == 1:
            self.store(value, pointer, self.convert(indices, i64), mask=mask)
            return
        addresses, mask = self._addresses(type_, pointer, indices, mask)
        operands = (self.listed([value]), addresses, self.listed([mask]))
        self.emit_void(self._call_masked("scatter", type_, "void", *operands))

    def _addresses(
        self, type_: Type, pointer: Value, indices: Value, mask: Value | None
    ) -> tuple[str, Value]:
        """The text of an address per lane, and a mask bit per lane."""
        addresses = self._address(type_.of(ptr), type_, pointer, indices)
        text = f"{addresses.type} align {type_.bytes} {addresses.text}"
        return text, mask if mask is not None else self.const(type_.of(i1), 1)

    def prefetch(self, pointer: Value, write: bool = False, locality: int = 3) -> None:
        """Prefetch a cache line at any address; locality 3 is L1, 2 is L2, 0 is non-temporal."""
        if not 0 <= locality <= 3:
            raise CompileError("no such locality", expected="0 to 3", found=locality)
        operands = (self.const(i32, number) for number in (int(write), locality, 1))
        self.intrinsic_void("llvm.prefetch.p0", pointer, *operands)

    # atomics, for the runtime

    def atomic_load(self, type_: Type, pointer: Value, order: str = "acquire") -> Value:
        return self.emit(
            type_, f"load atomic {type_.text}, ptr {pointer.text} {order}, align {type_.bytes}"
        )

    def atomic_store(self, value: Value, pointer: Value, order: str = "release") -> None:
        operands = self.listed((value, pointer))
        self.emit_void(f"store atomic {operands} {order}, align {value.type.bytes}")

    def atomic_add(self, pointer: Value, value: Value, order: str = "seq_cst") -> Value:
        """Add atomically; returns the previous value."""
        return self.emit(value.type, f"atomicrmw add {self.listed((pointer, value))} {order}")

    def compare_exchange(
        self, pointer: Value, expected: Value, new: Value, order: str = "seq_cst"
    ) -> Value:
        """Replace the expected value by a new one; returns whether the exchange happened."""
        operands = self.listed((pointer, expected, new))
        pair = self.emit(new.type, f"cmpxchg {operands} {order} monotonic")
        return self.emit(i1, f"extractvalue {{ {new.type}, i1 }} {pair.text}, 1")


def _type_of(operand: str) -> str:
    """The type at the start of an operand's text: a vector or a single word."""
    return operand[: operand.index(">") + 1] if operand[0] == "<" else operand.split(" ", 1)[0]
