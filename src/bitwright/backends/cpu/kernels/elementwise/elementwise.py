"""A kernel for any elementwise region: y = expression(x0, x1, …) with broadcasting.

All tensors have the region's shape; an operand has stride 0 along broadcast axes. Axes are merged
where every tensor allows it (`collapse`); the rest is a loop over rows of an inner axis. Threads
take equal ranges of the elements in row-major order, which may begin and end within a row; a row's
last vector is masked. Sizes and strides are run-time arguments; the expression, the rank, and the
inner stride of each tensor are compiled in: `contiguous`, `repeated`, or `strided` (gathered).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from bitwright.backends.cpu.codegen.emit import Kernel, Module, Signature, Value, i64, storage_type
from bitwright.backends.cpu.codegen.expression import Expression, from_stored, to_stored
from bitwright.errors import CompileError
from bitwright.ir.dtype import DType

CONTIGUOUS, REPEATED, STRIDED = "contiguous", "repeated", "strided"
_CHUNK_BYTES = 256
"""Threads' ranges are split at multiples of this, so that two of them rarely share a cache line."""
_CHAINS = frozenset({"erf", "exp", "gelu", "mish", "softplus", "tanh"})
"""Ops with long polynomials, which are chains of dependent instructions."""
_TOGETHER = 4
"""Vectors per iteration for these ops: LLVM splits a long vector into independent chains, which
out-of-order execution does not find by itself."""


@dataclass(frozen=True)
class Layout:
    """The compiled-in layout: the rank, and the kind of inner stride of each tensor."""

    rank: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def __post_init__(self) -> None:
        if REPEATED in self.outputs:
            raise CompileError("a result cannot repeat along an axis", found=self)


def movement(stride: int) -> str:
    """The kind of an inner stride."""
    return {0: REPEATED, 1: CONTIGUOUS}.get(stride, STRIDED)


def collapse(
    shape: Sequence[int], strides: Sequence[Sequence[int]]
) -> tuple[list[int], list[list[int]]]:
    """Drop axes of size 1 and merge neighbouring axes that are contiguous in every tensor."""
    kept = [axis for axis, size in enumerate(shape) if size != 1]
    sizes: list[int] = []
    moves: list[list[int]] = [[] for _ in strides]
    for axis in kept:
        here = [tensor[axis] for tensor in strides]
        if sizes and all(m[-1] == s * shape[axis] for m, s in zip(moves, here, strict=True)):
            sizes[-1] *= shape[axis]
            for move, stride in zip(moves, here, strict=True):
                move[-1] = stride
            continue
        sizes.append(shape[axis])
        for move, stride in zip(moves, here, strict=True):
            move.append(stride)
    if not sizes:
        return [1], [[1] for _ in strides]
    return sizes, moves


def signature_of(expression: Expression, layout: Layout) -> Signature:
    """Slots: x0 … and y0 … ; the sizes size0 … from the outermost axis to the inner one; for each
    tensor its strides along the outer axes (x0_0, …) and, if strided, along the inner one."""
    tensors = _names(expression)
    sizes = [f"size{axis}" for axis in range(layout.rank)]
    sizes += [f"{name}_{axis}" for name in tensors for axis in range(layout.rank - 1)]
    moves = zip(tensors, (*layout.inputs, *layout.outputs), strict=True)
    sizes += [f"{name}_inner" for name, move in moves if move == STRIDED]
    return Signature(tensors, sizes)


def _names(expression: Expression) -> list[str]:
    inputs = [f"x{number}" for number in range(len(expression.inputs))]
    return inputs + [f"y{number}" for number in range(len(expression.outputs))]


def emit_elementwise(
    module: Module, name: str, expression: Expression, layout: Layout
) -> Signature:
    """Emit the kernel of a region."""
    signature = signature_of(expression, layout)
    with module.kernel(name, signature) as f:
        _Emitter(f, expression, layout).emit()
    return signature


@dataclass
class _Tensor:
    name: str
    dtype: DType
    move: str


class _Emitter:
    def __init__(self, f: Kernel, expression: Expression, layout: Layout) -> None:
        self.f, self.expression, self.rank = f, expression, layout.rank
        self.in_half = f.target.computes_f16 and expression.is_exact_half
        """Whether to compute in f16, with twice the lanes and the same bits."""
        self.lanes = f.target.lanes(16 if self.in_half else expression.widest_bits)
        dtypes = (*expression.inputs, *expression.results)
        moves = (*layout.inputs, *layout.outputs)
        named = zip(_names(expression), dtypes, moves, strict=True)
        self.tensors = [_Tensor(*described) for described in named]

    def emit(self) -> None:
        f = self.f
        sizes = [f.args.size(f"size{axis}") for axis in range(self.rank)]
        total = sizes[0]
        for size in sizes[1:]:
            total = f.mul(total, size)
        begin, end = f.share(total, max(self.lanes, _CHUNK_BYTES * 8 // self._narrowest()))
        if self.rank == 1:
            pointers = [f.args.pointer(tensor.name) for tensor in self.tensors]
            with f.if_(f.lt(begin, end)):
                self._row(pointers, begin, end)
            return
        with f.if_(f.lt(begin, end)):
            self._rows(sizes, begin, end)

    def _narrowest(self) -> int:
        return min(storage_type(tensor.dtype).bits for tensor in self.tensors)

    def _rows(self, sizes: list[Value], begin: Value, end: Value) -> None:
        f, inner = self.f, sizes[-1]
        first, last = f.udiv(begin, inner), f.udiv(end - 1, inner)
        start = self._pointers(first, sizes)
        with f.loop(first, last + 1, carry=(self._position(first, sizes), *start)) as loop:
            row, (position, *pointers) = loop.index, loop.carried
            left = f.select(f.eq(row, first), begin - first * inner, 0)
            right = f.min(inner, end - row * inner)
            self._row(pointers, left, right)
            moved = [
                f.gep(
                    storage_type(tensor.dtype),
                    pointer,
                    f.args.size(f"{tensor.name}_{self.rank - 2}"),
                )
                for tensor, pointer in zip(self.tensors, pointers, strict=True)
            ]
            values = (position + 1, *moved)
            if self.rank > 2:
                with f.if_(f.eq(values[0], sizes[-2]), carry=values) as wrapped:
                    wrapped.next(f.const(i64, 0), *self._pointers(row + 1, sizes))
                values = wrapped.results
            loop.next(*values)

    def _position(self, row: Value, sizes: list[Value]) -> Value:
        """The row's coordinate on the last outer axis."""
        return row if self.rank == 2 else self.f.urem(row, sizes[-2])

    def _pointers(self, row: Value, sizes: list[Value]) -> list[Value]:
        """The row's address in each tensor."""
        f = self.f
        pointers = [f.args.pointer(tensor.name) for tensor in self.tensors]
        for axis in reversed(range(self.rank - 1)):
            outer = f.udiv(row, sizes[axis]) if axis else f.const(i64, 0)
            along = row - outer * sizes[axis] if axis else row
            row = outer
            pointers = [
                f.gep(storage_type(t.dtype), pointer, along * f.args.size(f"{t.name}_{axis}"))
                for t, pointer in zip(self.tensors, pointers, strict=True)
            ]
        return pointers

    def _row(self, pointers: list[Value], begin: Value, end: Value) -> None:
        """Emit elements begin … end - 1 of one row."""
        f, count = self.f, len(self.expression.inputs)
        inputs = list(zip(self.tensors[:count], pointers[:count], strict=True))
        outputs = list(zip(self.tensors[count:], pointers[count:], strict=True))
        repeated = {
            tensor.name: self._entered(f.load(storage_type(tensor.dtype), pointer), tensor)
            for tensor, pointer in inputs
            if tensor.move == REPEATED
        }

        def body(lanes: int, index: Value, mask: Value | None) -> None:
            values = [
                repeated[tensor.name]
                if tensor.name in repeated
                else self._load(tensor, pointer, index, mask, lanes)
                for tensor, pointer in inputs
            ]
            emit = self.expression.emit_half if self.in_half else self.expression.emit
            results = emit(f, values, lanes)
            for (tensor, pointer), result in zip(outputs, results, strict=True):
                self._store(tensor, pointer, index, mask, result)

        if any(step.op in _CHAINS for step in self.expression.steps):
            wide = _TOGETHER * self.lanes
            stop = end - f.urem(end - begin, wide)
            with f.loop(begin, stop, wide) as loop:
                body(wide, loop.index, None)
            begin = f.max(begin, stop)
        f.vectors(begin, end, self.lanes, partial(body, self.lanes))

    def _load(
        self, tensor: _Tensor, pointer: Value, index: Value, mask: Value | None, lanes: int
    ) -> Value:
        f = self.f
        type_ = storage_type(tensor.dtype).vector(lanes)
        if tensor.move == CONTIGUOUS:
            return self._entered(f.load(type_, pointer, index, mask=mask), tensor)
        read = f.gather(type_, pointer, self._steps(tensor, index, lanes), mask=mask)
        return self._entered(read, tensor)

    def _entered(self, value: Value, tensor: _Tensor) -> Value:
        """A loaded value in the computed type."""
        return value if self.in_half else from_stored(self.f, value, tensor.dtype)

    def _store(
        self, tensor: _Tensor, pointer: Value, index: Value, mask: Value | None, value: Value
    ) -> None:
        f = self.f
        held = to_stored(f, value, tensor.dtype)
        if tensor.move == CONTIGUOUS:
            f.store(held, pointer, index, mask=mask)
        else:
            f.scatter(held, pointer, self._steps(tensor, index, held.type.lanes), mask=mask)

    def _steps(self, tensor: _Tensor, index: Value, lanes: int) -> Value:
        f = self.f
        places = f.add(f.iota(i64, lanes), index)
        return f.mul(places, f.args.size(f"{tensor.name}_inner"))
