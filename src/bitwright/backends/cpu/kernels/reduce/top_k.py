"""The first k elements of each row in order (`kernels.reduce.ordering`), by a heap of k elements.

The heap is built in the result buffers; its root is the worst of the k. A vector of elements is
compared with the root at once; only a vector with a better element is processed element by element.
At the end the heap is sorted in place. Elements are visited by increasing index, so an element
equal to the root is never inserted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bitwright.backends.cpu.codegen.emit import Function, Kernel, Module, Operand, Signature, Value
from bitwright.backends.cpu.codegen.emit.types import i1, i64, ptr, storage_type, void
from bitwright.backends.cpu.codegen.expression import load_computed
from bitwright.backends.cpu.kernels.elementwise.loop_nest import position, product
from bitwright.backends.cpu.kernels.movement.fault import FAULT_SLOTS, record_fault
from bitwright.backends.cpu.kernels.parameters import KernelParameters
from bitwright.backends.cpu.kernels.reduce.ordering import Order
from bitwright.backends.cpu.lowering.region import Part, Reads, store


@dataclass(frozen=True)
class TopK(KernelParameters):
    order: Order
    before: Part
    x: Reads

    @property
    def signature(self) -> Signature:
        kept = [f"k{axis}" for axis in range(self.x.rank - 1)]
        sizes = (*kept, "columns", "count", *self.x.sizes, *FAULT_SLOTS)
        return Signature((*self.x.names, "values", "places", "fault"), sizes)


def emit_top_k(module: Module, name: str, kernel: TopK) -> Signature:
    sift = _Heap(kernel.order).emit_sift(module, f"{name}_sift")
    with module.kernel(name, kernel.signature) as f:
        kept = [f.args.size(f"k{axis}") for axis in range(kernel.x.rank - 1)]
        begin, end = f.share(product(f, kept))
        count, columns = f.args.size("count"), f.args.size("columns")
        outside = f.ult(columns, count)  # k is too large or negative
        with f.if_(outside) as branch, f.if_(f.lt(begin, end)):
            record_fault(f, count)
        with branch.else_(), f.if_(f.gt(count, 0)), f.loop(begin, end) as loop:
            _Row(f, kernel, sift, loop.index, position(f, kept, loop.index)).emit()
    return kernel.signature


@dataclass(frozen=True)
class _Heap:
    """A heap of pairs (value, index) in two arrays; a parent is never better than its children."""

    order: Order

    def value(self, f: Function, values: Value, at: Operand) -> Value:
        return self.order.to_compared(f, load_computed(f, self.order.element, 1, values, at))

    def worse(self, f: Function, a: tuple[Value, Value], b: tuple[Value, Value]) -> Value:
        """Whether a comes after b in the result."""
        tied = f.and_(self.order.ties(f, a[0], b[0]), f.gt(a[1], b[1]))
        return f.or_(self.order.before(f, b[0], a[0]), tied)

    def emit_sift(self, module: Module, name: str) -> Function:
        """A function that sifts down the pair at `start` in a heap of `size` pairs."""
        params = (("values", ptr), ("places", ptr), ("start", i64), ("size", i64))
        element = self.order.element
        with module.function(name, void, params) as f:
            values, places, start, size = f.params
            item = self.value(f, values, start), f.load(i64, places, start)
            with f.do_while(carry=(start,)) as loop:
                (parent,) = loop.carried
                left = parent * 2 + 1
                with f.if_(f.lt(left, size), carry=(parent, f.const(i1, 0))) as inside:
                    right = f.min(left + 1, size - 1)
                    first, second = (
                        (self.value(f, values, at), f.load(i64, places, at)) for at in (left, right)
                    )
                    swap = self.worse(f, second, first)
                    child = f.select(swap, right, left)
                    pair = f.select(swap, second[0], first[0]), f.select(swap, second[1], first[1])
                    falls = self.worse(f, pair, item)
                    with f.if_(falls):
                        store(f, f.convert(pair[0], item[0].type), element, values, parent)
                        f.store(pair[1], places, parent)
                    inside.next(f.select(falls, child, parent), falls)
                parent, falls = inside.results
                loop.next(parent, again=falls)
            (parent,) = loop.results
            store(f, item[0], element, values, parent)
            f.store(item[1], places, parent)
        return f


class _Row:
    def __init__(
        self, f: Kernel, kernel: TopK, sift: Function, row: Value, index: Sequence[Value]
    ) -> None:
        self.f, self.kernel, self.sift = f, kernel, sift
        self.heap, self.order = _Heap(kernel.order), kernel.order
        self.lanes = f.target.lanes(self.order.type.bits)
        self.columns, self.count = f.args.size("columns"), f.args.size("count")
        start = row * self.count
        self.values = f.gep(storage_type(self.order.element), f.args.pointer("values"), start)
        self.places = f.gep(i64, f.args.pointer("places"), start)
        self.one = kernel.x.at(f, index, 1)
        self.many = kernel.x.at(f, index, self.lanes)

    def emit(self) -> None:
        f, count = self.f, self.count
        with f.loop(0, count, nonempty=True) as loop:
            self._put(self._value(loop.index), loop.index, loop.index)
        with f.loop(0, f.udiv(count, 2)) as loop:
            f.call(self.sift, self.values, self.places, f.udiv(count, 2) - 1 - loop.index, count)
        f.vectors(count, self.columns, self.lanes, self._compare)
        with f.loop(1, count) as loop:
            last = count - loop.index
            root = self.heap.value(f, self.values, 0), f.load(i64, self.places)
            moved = self.heap.value(f, self.values, last), f.load(i64, self.places, last)
            self._put(*root, last)
            self._put(*moved, f.index(0))
            f.call(self.sift, self.values, self.places, 0, last)

    def _put(self, value: Value, place: Value, at: Value) -> None:
        store(self.f, value, self.order.element, self.values, at)
        self.f.store(place, self.places, at)

    def _value(self, column: Value) -> Value:
        v = self.kernel.before.evaluate(self.f, self.one.load(column), 1)
        return self.order.to_compared(self.f, v)

    def _compare(self, column: Value, mask: Value | None) -> None:
        """Compare a vector of elements with the root; insert those that come before it."""
        f = self.f
        v = self.kernel.before.evaluate(f, self.many.load(column, mask), self.lanes)
        root = self.heap.value(f, self.values, 0)
        wins = self.order.before(f, self.order.to_compared(f, v), f.splat(root, self.lanes))
        wins = wins if mask is None else f.and_(wins, mask)
        with f.if_(f.any(wins)):
            stop = f.min(column + self.lanes, self.columns)
            with f.loop(column, stop, nonempty=True) as loop:
                one = self._value(loop.index)
                root = self.heap.value(f, self.values, 0)
                with f.if_(self.order.before(f, one, root)):
                    self._put(one, loop.index, f.index(0))
                    f.call(self.sift, self.values, self.places, 0, self.count)
