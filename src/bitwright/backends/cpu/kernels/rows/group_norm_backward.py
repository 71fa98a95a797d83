"""The gradient of group_norm; a row is one (batch, group): all columns of the group's channels.

With n elements of a group, c = x - mean, r = 1 / √(Σ c² / n + eps):

    first pass    mean
    second pass   Σ c² of the group; a = Σ dy and b = Σ dy · c of each channel
    then          shift = Σ scale · a / n,  slope = r² · Σ scale · b / n  over the group's channels
    third pass    dx = r · (scale · dy - shift - c · slope)

The sums of a batch are partial sums over batches: dscale += r · b, dbias += a
(`kernels.rows.sum_blocks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bitwright.backends.cpu.codegen.emit import Kernel, Module, Signature, Value, storage_type
from bitwright.backends.cpu.codegen.emit.types import computed
from bitwright.backends.cpu.codegen.expression import load_computed
from bitwright.backends.cpu.lowering.region import store
from bitwright.ir.dtype import DType

ACCUMULATORS = 4


@dataclass(frozen=True)
class GroupNormBackward:
    """x and dy are contiguous, with axes (batch, group, channel of the group, column)."""

    element: DType
    eps: float
    has_scale: bool

    @property
    def signature(self) -> Signature:
        pointers = ("dy", "x", *("scale",) * self.has_scale, "dx", "partial")
        return Signature(pointers, ("batches", "groups", "channels", "columns"))


def emit_group_norm_backward(module: Module, name: str, form: GroupNormBackward) -> Signature:
    with module.kernel(name, form.signature) as f:
        begin, end = f.share(f.args.size("batches") * f.args.size("groups"))
        with f.loop(begin, end) as loop:
            _Group(f, form, loop.index).emit()
    return form.signature


class _Group:
    """Emits one group of channels of one batch."""

    def __init__(self, f: Kernel, form: GroupNormBackward, row: Value) -> None:
        self.f, self.form = f, form
        self.type, stored = computed(form.element), storage_type(form.element)
        self.lanes = f.target.lanes(self.type.bits)
        self.zero = f.const(self.type.vector(self.lanes), 0.0)
        groups, self.channels, self.columns = map(f.args.size, ("groups", "channels", "columns"))
        start = row * self.channels * self.columns
        self.x, self.dy, self.dx = (
            f.gep(stored, f.args.pointer(name), start) for name in ("x", "dy", "dx")
        )
        batch = f.udiv(row, groups)
        first = (row - batch * groups) * self.channels
        if form.has_scale:
            self.scale = f.gep(stored, f.args.pointer("scale"), first)
        at = batch * 2 * groups * self.channels + first
        self.products = f.gep(self.type, f.args.pointer("partial"), at)
        self.gradients = f.gep(self.type, self.products, groups * self.channels)

    def emit(self) -> None:
        f = self.f
        whole = self.channels * self.columns
        count = f.convert(whole, self.type)
        mean = f.div(self._sum(whole), count)
        squares, shift, slope = self._sum_channels(mean)
        rate = f.div(1.0, f.sqrt(f.add(f.div(squares, count), self.form.eps)))
        shift = f.div(shift, count)
        slope = f.neg(f.div(slope, count) * rate * rate)
        with f.loop(0, self.channels) as loop:
            channel = loop.index
            held = f.load(self.type, self.products, channel)
            f.store(held * rate, self.products, channel)
            self._write(channel, (self._scale(channel), mean, rate, shift, slope))

    def _scale(self, channel: Value) -> Value:
        if not self.form.has_scale:
            return self.f.const(self.type, 1.0)
        return load_computed(self.f, self.form.element, 1, self.scale, channel)

    def _load(self, pointer: Value, at: Value, mask: Value | None) -> Value:
        return load_computed(self.f, self.form.element, self.lanes, pointer, at, mask=mask)

    def _sum(self, whole: Value) -> Value:
        """The sum of x over the group."""
        f = self.f

        def body(at: Value, mask: Value | None, *totals: Value) -> Sequence[Value]:
            return (*totals[1:], totals[0] + self._load(self.x, at, mask))

        start = (self.zero,) * ACCUMULATORS
        totals = f.vectors(0, whole, self.lanes, body, start, unroll=ACCUMULATORS)
        return f.reduce_add(f.combine(totals, f.add))

    def _sum_channels(self, mean: Value) -> tuple[Value, ...]:
        """Σ c², Σ scale · a, Σ scale · b; stores a and b of each channel."""
        f = self.f
        zero = f.const(self.type, 0.0)
        centre = f.splat(mean, self.lanes)
        with f.loop(0, self.channels, carry=(zero,) * 3) as loop:
            start = loop.index * self.columns

            def body(column: Value, mask: Value | None, *totals: Value) -> Sequence[Value]:
                squares, gradients, products = totals[:3]
                c = self._load(self.x, start + column, mask) - centre
                c = c if mask is None else f.select(mask, c, 0.0)
                dy = self._load(self.dy, start + column, mask)
                new = f.fma(c, c, squares), gradients + dy, f.fma(dy, c, products)
                return (*totals[3:], *new)

            totals = f.vectors(0, self.columns, self.lanes, body, (self.zero,) * 6, unroll=2)
            sums = [f.reduce_add(totals[i] + totals[i + 3]) for i in range(3)]
            squares, gradients, products = sums
            f.store(gradients, self.gradients, loop.index)
            f.store(products, self.products, loop.index)
            scale = self._scale(loop.index)
            loop.next(
                loop.carried[0] + squares,
                f.fma(scale, gradients, loop.carried[1]),
                f.fma(scale, products, loop.carried[2]),
            )
        return loop.results

    def _write(self, channel: Value, numbers: Sequence[Value]) -> None:
        f, element = self.f, self.form.element
        start = channel * self.columns
        scale, mean, rate, shift, slope = (f.splat(v, self.lanes) for v in numbers)

        def body(column: Value, mask: Value | None) -> None:
            dy, x = (self._load(p, start + column, mask) for p in (self.dy, self.x))
            result = f.fma(x - mean, slope, dy * scale - shift) * rate
            store(f, result, element, self.dx, start + column, mask)

        f.vectors(0, self.columns, self.lanes, body, unroll=2)
