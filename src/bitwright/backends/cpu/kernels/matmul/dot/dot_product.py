"""The dot product of a register tile: how one step of k is loaded, multiplied and summed.

A step takes `group` elements of every row of a and one unit of a packed panel for every column.
`F32Dot` takes one element of each; the modules beside this one implement integers and half floats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from bitwright.backends.cpu.codegen.emit import Kernel, Type, Value, f32, i16, i32
from bitwright.backends.cpu.kernels.matmul.register_tile import Tile
from bitwright.ir.dtype import DType

if TYPE_CHECKING:
    from bitwright.backends.cpu.kernels.matmul.dot.amx_block import Tiles

ONE_PLANE = ((0, 0),)


class ProductContext(Protocol):
    """The part of a product that `DotProduct.add_corrections` uses."""

    f: Kernel
    tile: Tile

    def group_offset(self, places: Value) -> Value:
        """The byte offset in a row of the group that `rest_places` names here."""


class DotProduct:
    """Loads and multiplies the operands of one step. Its `repr` is part of the kernel's key."""

    group: int = 1
    """Elements of a row in one step."""
    has_tail: bool
    """Whether a run may end with fewer elements than a group."""
    upcasts_rows: bool = False
    """Whether pieces of rows are converted to f32 before they are multiplied."""
    tiles: Tiles | None = None
    """AMX tile operations, where blocks of sums are held in tile registers."""
    plane_pairs: tuple[tuple[int, int], ...] = ONE_PLANE
    """What an AMX step multiplies: planes of the rows, each with a part of the panel."""
    sum_type: Type = f32
    extra: int = 0
    """Vectors of sums per row in addition to those of its columns."""

    @property
    def name(self) -> str:
        """Operand types, sum type and instruction family, for the names of kernels."""
        raise NotImplementedError

    @property
    def pointers(self) -> tuple[str, ...]:
        """Slots that `initial_sums` and `subtract_zero_points` read."""
        return ()

    @property
    def element(self) -> Type:
        """The type of one element of a."""
        raise NotImplementedError

    @property
    def unit(self) -> Type:
        """The type that a step reads from a panel for one column."""
        raise NotImplementedError

    def initial_sums(
        self, f: Kernel, column: Value, masks: Sequence[Value | None], lanes: int
    ) -> list[Value]:
        """The initial sums of a row."""
        return [f.const(f32.vector(lanes), 0.0)] * len(masks)

    def load_rhs(self, f: Kernel, w: Value, vectors: int, lanes: int) -> list[Any]:
        """The right operands of one step: one per vector of columns, then `extra` more."""
        raise NotImplementedError

    def load_lhs(self, f: Kernel, row: Value, step: Value, lanes: int) -> Any:
        """One group of a row, broadcast to all lanes."""
        raise NotImplementedError

    def load_lhs_tail(self, f: Kernel, row: Value, step: Value, count: Value, lanes: int) -> Any:
        """As `load_lhs` for a group of which only `count` elements exist; the others are 0."""
        raise NotImplementedError

    def multiply_add(self, f: Kernel, lhs: Any, rhs: Any, total: Value) -> Value:
        raise NotImplementedError

    def add_corrections(
        self, product: ProductContext, rows: Sequence[Value], column: Value, sums: list[Value]
    ) -> list[Value]:
        """A tile's sums with the products that its panel leaves out."""
        return sums

    def subtract_zero_points(
        self, f: Kernel, sums: list[Value], column: Value, masks: Sequence[Value | None]
    ) -> None:
        """Applies the `extra` sums of a row to the sums of its columns, in place."""


class F32Dot(DotProduct):
    """One f32 multiply-add per step, fused where the target supports it."""

    name, has_tail = "f32", False
    element = unit = f32

    def __repr__(self) -> str:
        return "f32"

    def load_rhs(self, f: Kernel, w: Value, vectors: int, lanes: int) -> list[Value]:
        return [f.load(f32.vector(lanes), w, v * lanes) for v in range(vectors)]

    def load_lhs(self, f: Kernel, row: Value, step: Value, lanes: int) -> Value:
        return f.splat(f.load(f32, row, step), lanes)

    def multiply_add(self, f: Kernel, lhs: Value, rhs: Value, total: Value) -> Value:
        return f.fma(lhs, rhs, total)


F32_DOT = F32Dot()


def type_names(*elements: DType) -> str:
    """Element types in kernel names, such as u8s8s32; one name where all are the same."""
    signed = [element.is_integer and element.is_signed for element in elements]
    names = [f"s{e.bits}" if s else str(e) for e, s in zip(elements, signed, strict=True)]
    return names[0] if len(set(names)) == 1 else "".join(names)


def load_pair(f: Kernel, element: Type, row: Value, step: Value, lanes: int) -> Value:
    """Two neighbouring 16-bit elements of a row, broadcast to all columns."""
    both = f.load(i32, f.offset(row, step * 4), align=2)
    return f.bitcast(f.splat(both, lanes), element.vector(2 * lanes))


def load_last_pair(f: Kernel, element: Type, row: Value, step: Value, lanes: int) -> Value:
    """The last element of a row and 0, broadcast to all columns."""
    last = f.convert(f.load(i16, f.offset(row, step * 4)), i32, False)
    return f.bitcast(f.splat(last, lanes), element.vector(2 * lanes))
