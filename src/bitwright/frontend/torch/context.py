"""The context of a mapping: the builder, operands of the right type, and shapes.

A shape is a sequence of sizes and, for data-dependent sizes, of values of rank 0. A shape whose
sizes the node's operands or the graph's inputs bind is an attribute, any other an i64 operand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bitwright.frontend.builder import TypedBuilder
from bitwright.frontend.torch.registry import UnmappedError, maps, maps_table
from bitwright.frontend.torch.scalars import Ratio
from bitwright.ir.dim import Dim, Size, Symbol, symbols_of
from bitwright.ir.dtype import DType, bool_, dtype, f64, i64
from bitwright.ir.graph import Value
from bitwright.ir.types import broadcast_shapes, normalize_axis
from bitwright.ops.shape.movement import resolve_reshape
from bitwright.ops.shape.slicing import normalize_slice

if TYPE_CHECKING:
    from bitwright.frontend.torch.graph_importer import GraphImporter

__all__ = ["Context", "Shape", "maps", "maps_table"]

Shape = Sequence[Any]


class Context:
    def __init__(self, importer: GraphImporter) -> None:
        self.importer = importer
        self.results: tuple[DType | None, ...] = ()
        """The element types of the op's results after torch's type promotion."""
        self.common: DType | None = None
        """The promoted type of the first two operands, for comparisons."""
        self.wanted: frozenset[int] = frozenset()
        """The indices of the results that are read."""

    @property
    def b(self) -> TypedBuilder:
        return self.importer.b

    @property
    def element(self) -> DType:
        """The element type of the first result."""
        assert self.results[0] is not None
        return self.results[0]

    def refuse(self, reason: str) -> UnmappedError:
        return UnmappedError(reason)

    # numbers and element types

    def const(self, value: Any, element: str | DType = i64) -> Value:
        array = np.asarray(value)
        numpy = dtype(element).numpy
        return self.b.constant(array if array.dtype == numpy else array.astype(numpy))

    def cast(self, x: Value, element: str | DType) -> Value:
        target = dtype(element)
        return x if x.dtype == target else self.b.cast(x, to=target)

    def operand(self, x: Any, element: str | DType | None = None) -> Value:
        """A tensor or number in this element type, by default that of the result."""
        target = self.element if element is None else dtype(element)
        return self.cast(x, target) if isinstance(x, Value) else self.scalar(x, target)

    def scalar(self, number: Any, element: str | DType = i64) -> Value:
        """A number as a tensor of rank 0."""
        target = dtype(element)
        if isinstance(number, Value):
            return self.cast(self.reshape(number, ()), target)
        if isinstance(number, Dim):
            return self.cast(self._size_value(number), target)
        if isinstance(number, Ratio):
            parts = (self.scalar(n, f64) for n in (number.numerator, number.denominator))
            return self.cast(self.b.div(*parts), target)
        return self.const(number, target)

    def static(self, numbers: Any, what: str) -> list[int]:
        """Numbers that must be constant."""
        found: list[int] = []
        for number in [numbers] if isinstance(numbers, (int, Dim, Value)) else numbers:
            if not isinstance(number, int):
                raise self.refuse(f"{what} must be constant and is {number}")
            found.append(number)
        return found

    # sizes

    @property
    def known_symbols(self) -> frozenset[Symbol]:
        return self.importer.known_symbols

    def usable(self, shape: Shape, *operands: Value) -> bool:
        """Whether the operands or the inputs bind every symbol, so that attributes may use it."""
        if any(isinstance(size, Value) for size in shape):
            return False
        needed = frozenset[Symbol]().union(*map(symbols_of, shape))
        return needed <= self.known_symbols.union(*(v.type.symbols for v in operands))

    def vector(self, shape: Shape) -> Value:
        """A shape as an i64 tensor."""
        if not any(isinstance(size, (Dim, Value)) for size in shape):
            return self.const(np.array(shape, np.int64))
        if self.usable(shape):
            return self.b.sizes(values=tuple(shape), shape=(len(shape),))
        parts = [self.b.reshape(self.scalar(size), shape=(1,)) for size in shape]
        return parts[0] if len(parts) == 1 else self.b.concat(*parts, axis=0)

    def _size_value(self, size: Dim) -> Value:
        """A size as a scalar, computed from shapes of values if no input binds its symbols."""
        if self.usable([size]):
            return self.b.sizes(values=(size,), shape=())
        total: Value | None = None
        for monomial, coefficient in size.terms:
            term = self.const(coefficient)
            for atom in monomial:
                term = self.b.mul(term, self._atom_value(atom))
            total = term if total is None else self.b.add(total, term)
        assert total is not None
        return total

    def _atom_value(self, atom: Any) -> Value:
        if isinstance(atom, Symbol):
            return self._symbol_value(Dim((((atom,), 1),)))
        left, right = (self.scalar(arg) for arg in atom.args)
        ops = {"floordiv": "div", "mod": "mod", "min": "minimum"}  # sizes are not negative
        return self.b.op(ops.get(atom.kind, "maximum"), left, right)

    def _symbol_value(self, size: Dim) -> Value:
        if self.usable([size]):
            return self.b.sizes(values=(size,), shape=())
        for node in self.b.nodes:
            for value in node.outputs:
                if size in getattr(value.type, "shape", ()):
                    axis = value.shape.index(size)
                    return self.b.gather(self.b.shape_of(value), self.const(axis))
        raise self.refuse(f"no value binds the size {size}")

    def refine(self, value: Value, shape: Shape) -> Value:
        """The value of the last node, with known sizes where inference left them open."""
        node = value.node
        assert node is self.b.nodes[-1] and len(node.types) == 1
        exact = tuple(
            own if isinstance(own, int) or isinstance(better, Value) or better is None else better
            for own, better in zip(value.shape, shape, strict=True)
        )
        self.b.nodes[-1] = node.with_(types=(value.tensor.with_shape(exact),))
        return self.b.nodes[-1].outputs[0]

    # shapes

    def reshape(self, x: Value, shape: Shape) -> Value:
        """`x` in another shape; one size may be -1."""
        if not any(isinstance(size, Value) for size in shape):
            shape = resolve_reshape(x.shape, tuple(shape), allowzero=True)
            if shape == x.shape:
                return x
            if self.usable(shape, x):
                return self.b.reshape(x, shape=shape)
        known = [None if isinstance(size, int) and size < 0 else size for size in shape]
        return self.refine(self.b.reshape(x, self.vector(shape), allowzero=True), known)

    def expand(self, x: Value, shape: Shape) -> Value:
        """Broadcast to a final shape."""
        if tuple(shape) == x.shape:
            return x
        if self.usable(shape, x):
            return self.b.expand(x, shape=tuple(shape))
        return self.refine(self.b.expand(x, self.vector(shape)), shape)

    def broadcast(self, *xs: Value) -> tuple[Value, ...]:
        """The tensors, broadcast to their common shape."""
        shape = broadcast_shapes(*(x.shape for x in xs))
        return tuple(self.expand(x, shape) for x in xs)

    def unsqueeze(self, x: Value, *axes: int) -> Value:
        rank = x.rank + len(axes)
        places = {normalize_axis(axis, rank) for axis in axes}
        rest = iter(x.shape)
        return self.reshape(x, [1 if i in places else next(rest) for i in range(rank)])

    def squeeze(self, x: Value, *axes: int) -> Value:
        """`x` without those of the axes whose size is 1."""
        places = {normalize_axis(axis, x.rank) for axis in axes} if x.rank else set()
        kept = [s for i, s in enumerate(x.shape) if i not in places or s != 1]
        return self.reshape(x, kept)

    def transpose(self, x: Value, perm: Sequence[int]) -> Value:
        perm = [normalize_axis(axis, x.rank) for axis in perm]
        return x if perm == list(range(x.rank)) else self.b.transpose(x, perm=perm)

    def move_axis(self, x: Value, source: int, target: int) -> Value:
        order = [axis for axis in range(x.rank) if axis != normalize_axis(source, x.rank)]
        order.insert(normalize_axis(target, x.rank), normalize_axis(source, x.rank))
        return self.transpose(x, order)

    def slice(self, x: Value, axis: int, start: Any, stop: Any, step: int = 1) -> Value:
        """Python's `x[start:stop:step]` on one axis."""
        axis = normalize_axis(axis, x.rank)
        if not isinstance(start, Value) and not isinstance(stop, Value):
            start, stop = normalize_slice(x.shape[axis], start, stop, step)
            if (start, stop, step) == (0, x.shape[axis], 1):
                return x
            if self.usable([start, stop], x):
                attrs = {"starts": [start], "stops": [stop], "steps": [step], "axes": [axis]}
                return self.b.slice(x, **attrs)
        bounds = (self.vector([bound]) for bound in (start, stop))
        cut = self.b.slice(x, *bounds, self.const([axis]), self.const([step]))
        return self.refine(cut, [None if i == axis else s for i, s in enumerate(x.shape)])

    def take(self, x: Value, axis: int, index: int) -> Value:
        """`x[index]` on one axis, which is removed."""
        return self.b.gather(x, self.const(index), axis=axis)

    # new tensors

    def full(self, value: Any, shape: Shape, element: str | DType) -> Value:
        return self.expand(self.scalar(value, element), shape)

    def iota(self, length: Any, element: str | DType = i64) -> Value:
        """0, 1, … length - 1"""
        if self.usable([length]):
            return self.b.iota(length=length, dtype=dtype(element))
        counted = self.b.range(self.const(0), self.scalar(length), self.const(1))
        return self.cast(self.refine(counted, [length]), element)

    def count(self, x: Value, axes: Sequence[int]) -> Size:
        """The number of elements over some axes."""
        total: Size = 1
        for axis in axes:
            total = total * x.shape[axis]
        return total

    def axes(self, x: Value, dims: Any) -> list[int]:
        """Non-negative axes; None or an empty list means all of them."""
        if isinstance(dims, int):
            dims = [dims]
        if not dims:
            return list(range(x.rank))
        return [normalize_axis(axis, max(x.rank, 1)) for axis in dims] if x.rank else []

    # logic

    def truth(self, x: Any) -> Value:
        """Whether each element is not zero."""
        return self.operand(x, bool_)
