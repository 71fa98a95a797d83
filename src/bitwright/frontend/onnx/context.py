"""The context of a mapping: the builder, and queries about sizes and constants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import GraphProto

from bitwright.errors import ImportModelError
from bitwright.frontend.builder import TypedBuilder
from bitwright.frontend.onnx.frame import Frame, Scope
from bitwright.frontend.onnx.registry import UnmappedError
from bitwright.ir import Dim, DType, Size, Value, ValueType
from bitwright.ir.dim import Symbol, symbols_of
from bitwright.ir.dtype import dtype, i64
from bitwright.ir.types import normalize_axis

if TYPE_CHECKING:
    from bitwright.frontend.onnx.importer import Importer
    from bitwright.frontend.onnx.node import OnnxNode

Array = np.ndarray[Any, Any]


class Inputs(list[Any]):
    """The operands of a node; absent ones are None, past the end too.

    Elements are `Any`, because a mapping reads required operands without a check: `check_arity`
    and `microsoft(needs=…)` have made sure that they exist.
    """

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int) and index >= len(self):
            return None
        return super().__getitem__(index)


class Context:
    def __init__(self, importer: Importer, scope: Scope) -> None:
        self.importer, self.scope = importer, scope

    @property
    def frame(self) -> Frame:
        return self.scope.frame

    @property
    def b(self) -> TypedBuilder:
        return self.scope.frame.b

    def find(self, name: str) -> Value | None:
        """The value that the name means in this scope."""
        return self.scope.find(name, self.importer.on_capture)

    # constants

    def const(self, value: Any, element: str | DType = i64) -> Value:
        """A new constant of this element type."""
        array = np.asarray(value)
        numpy = dtype(element).numpy
        if array.dtype != numpy:
            narrow = dtype(element).is_integer and dtype(element).bits < 8
            array = (array.astype(np.int8) if narrow else array).astype(numpy)
        return self.b.constant(array)

    def like(self, x: Value, value: Any) -> Value:
        """A scalar constant of the element type of `x`."""
        return self.const(value, x.dtype)

    def array(self, value: Value | None) -> Array | None:
        """The constant value, if it depends on constants only."""
        if value is None:
            return None
        if value.node.op in ("constant", "parameter"):
            known: Array | None = value.node.attrs.get("value")
            return known
        return self.importer.folder.array(value)

    def need_array(self, value: Value, what: str) -> Array:
        array = self.array(value)
        if array is None:
            raise UnmappedError(f"{what} must be constant, and {value} is computed")
        return array

    def need_ints(self, value: Value, what: str) -> list[int]:
        return [int(number) for number in self.need_array(value, what).reshape(-1)]

    # sizes

    def usable(self, sizes: Sequence[Size], *operands: Value | None) -> bool:
        """Whether the operands or the inputs bind every symbol, so that attributes may use it."""
        needed = frozenset[Symbol]().union(*map(symbols_of, sizes))
        bound = self.frame.known_symbols.union(*(v.type.symbols for v in operands if v is not None))
        return needed <= bound

    def sizes(self, value: Value, *operands: Value | None) -> tuple[Size, ...] | None:
        """The sizes in a vector, if an attribute of a node with these operands may use them."""
        found = self.all_sizes(value)
        return found if found is not None and self.usable(found, *operands) else None

    def all_sizes(self, value: Value) -> tuple[Size, ...] | None:
        """The sizes in a vector, whether attributes may use them or not."""
        found = self.importer.evaluator.sizes(value)
        if found is None and (array := self.array(value)) is not None and array.dtype.kind in "iu":
            found = tuple(int(number) for number in array.reshape(-1))
        return found

    def length(self, x: Value, axis: int = 0) -> int:
        """A size that must be known, because the form of the node depends on it."""
        size = x.shape[normalize_axis(axis, x.rank)]
        if not isinstance(size, int):
            raise UnmappedError(f"axis {axis} of {x} has no known size")
        return size

    def shape_of(self, x: Value) -> Value:
        """The shape of `x` as a tensor."""
        return self.vector(x.shape, x) or self.b.shape_of(x)

    def vector(self, sizes: Sequence[Size], *holders: Value) -> Value | None:
        """Sizes as an i64 tensor; None if neither the inputs nor the holders bind one of them."""
        numbers = [size for size in sizes if not isinstance(size, Dim)]
        if len(numbers) == len(sizes):
            if max(numbers, default=0) >= 1 << 63:
                raise ImportModelError(f"a size is beyond 64 bits: {list(sizes)}")
            return self.const(np.array(numbers, np.int64))
        if self.usable(sizes):
            return self.b.sizes(values=tuple(sizes), shape=(len(sizes),))
        parts = [self._size_value(size, holders) for size in sizes]
        return None if None in parts else self.b.concat(*parts, axis=0)

    def need_vector(self, sizes: Sequence[Size], *holders: Value) -> Value:
        """Sizes that the inputs or the holders bind, as an i64 tensor."""
        vector = self.vector(sizes, *holders)
        if vector is None:
            raise UnmappedError(f"no operand binds the sizes {list(sizes)}")
        return vector

    def _size_value(self, size: Size, holders: Sequence[Value]) -> Value | None:
        if self.usable([size]):
            return self.vector([size])
        for holder in holders:
            for axis, held in enumerate(holder.shape):
                if held == size:
                    shape = self.b.shape_of(holder)
                    return self.b.slice(shape, starts=[axis], stops=[axis + 1], steps=[1], axes=[0])
        return None

    def refine(self, value: Value, shape: Sequence[Size | None]) -> Value:
        """The value of the last node, with known sizes where inference left them open."""
        node = value.node
        assert node is self.b.nodes[-1] and len(node.types) == 1
        exact = tuple(
            own if isinstance(own, int) or better is None else better
            for own, better in zip(value.shape, shape, strict=True)
        )
        if exact == value.shape:
            return value
        self.b.nodes[-1] = node.with_(types=(value.tensor.with_shape(exact),))
        return self.b.nodes[-1].outputs[0]

    # shapes and element types

    def cast(self, x: Value, element: str | DType) -> Value:
        target = dtype(element)
        return x if x.dtype == target else self.b.cast(x, to=target)

    def reshape(self, x: Value, shape: Sequence[Size]) -> Value:
        """`x` in another shape; sizes that no operand binds become an operand of the node."""
        if tuple(shape) == x.shape:
            return x
        if self.usable(shape, x):
            return self.b.reshape(x, shape=tuple(shape))
        return self.refine(self.b.reshape(x, self.need_vector(shape, x)), shape)

    def unsqueeze(self, x: Value, axes: Sequence[int]) -> Value:
        rank = x.rank + len(axes)
        places = {normalize_axis(axis, rank) for axis in axes}
        if len(places) != len(axes):
            raise ImportModelError(f"an axis is repeated in {list(axes)}")
        rest = iter(x.shape)
        return self.reshape(x, [1 if i in places else next(rest) for i in range(rank)])

    def squeeze(self, x: Value, axes: Sequence[int]) -> Value:
        places = {normalize_axis(axis, x.rank) for axis in axes}
        for axis in places:
            if isinstance(x.shape[axis], int) and x.shape[axis] != 1:
                raise ImportModelError(
                    f"axis {axis} cannot be squeezed", expected="size 1", found=x.tensor
                )
        return self.reshape(x, [s for i, s in enumerate(x.shape) if i not in places])

    def transpose(self, x: Value, *perm: int) -> Value:
        return x if list(perm) == list(range(x.rank)) else self.b.transpose(x, perm=perm)

    def slice(self, x: Value, axis: int, start: Size, stop: Size) -> Value:
        """Part of one axis; the bounds are not negative."""
        axis = normalize_axis(axis, x.rank)
        if start == 0 and stop == x.shape[axis]:
            return x
        return self.b.slice(x, starts=[start], stops=[stop], steps=[1], axes=[axis])

    def full(self, value: Any, shape: Sequence[Size], element: str | DType) -> Value:
        """A tensor of one value."""
        scalar = self.const(value, element)
        return self.b.expand(scalar, shape=tuple(shape)) if len(shape) else scalar

    def full_like(self, x: Value, value: Any, element: str | DType) -> Value:
        """A tensor of one value with the shape of `x`."""
        if self.usable(x.shape):
            return self.full(value, x.shape, element)
        return self.refine(self.b.expand(self.const(value, element), self.b.shape_of(x)), x.shape)

    # nested graphs

    def body(self, graph: GraphProto, types: Sequence[ValueType], first: int = 0) -> Body:
        return self.importer.body(self.scope, graph, types, first)

    def inline(self, graph: GraphProto, inputs: Sequence[Value] = ()) -> list[Value]:
        """The outputs of a nested graph, whose nodes are inlined."""
        return self.importer.inline(self.scope, graph, inputs)

    def fallback(self, node: OnnxNode, inputs: Inputs) -> list[Value | None]:
        return self.importer.fallback(self.scope, node, inputs)


class Body:
    """An imported nested graph, without its captures as inputs yet."""

    def __init__(self, frame: Frame, inputs: list[Value], outputs: list[tuple[str, Value]]) -> None:
        self.frame, self.inputs, self.outputs = frame, inputs, outputs

    @property
    def types(self) -> list[ValueType]:
        return [value.type for _, value in self.outputs]
