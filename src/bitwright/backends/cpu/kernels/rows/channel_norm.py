"""Normalization with channels: group_norm (and instance_norm), batch_norm, lrn.

group_norm   a row is one (batch, group): all columns of the group's channels; the passes of
             layer_norm, then scale and bias per channel
batch_norm   (x - mean) · scale / √(var + eps) + bias, elementwise with broadcast operands
lrn          x / (bias + alpha / size · Σ x² over neighbouring channels) ^ beta
"""

from __future__ import annotations

from dataclasses import dataclass

from bitwright.backends.cpu.codegen import math as vector_math
from bitwright.backends.cpu.codegen.emit import Kernel, Module, Signature, Value
from bitwright.backends.cpu.codegen.emit.types import Type, computed, storage_type
from bitwright.backends.cpu.codegen.expression import load_computed
from bitwright.backends.cpu.kernels.elementwise.loop_nest import position, product
from bitwright.backends.cpu.kernels.parameters import KernelParameters
from bitwright.backends.cpu.kernels.rows.formulas import Pass, layer_norm
from bitwright.backends.cpu.lowering.region import Part, Reads, Row, store
from bitwright.ir.dtype import DType

ACCUMULATORS = 4


@dataclass(frozen=True)
class GroupNorm(KernelParameters):
    """x has axes (batch, group, channel of the group, column)."""

    element: DType
    eps: float
    x: Reads
    has_scale: bool
    has_bias: bool
    after: Part
    extras: Reads

    @property
    def weights(self) -> tuple[str, ...]:
        return ("scale",) * self.has_scale + ("bias",) * self.has_bias

    @property
    def signature(self) -> Signature:
        sizes = ("batches", "groups", "channels", "columns", *self.x.sizes, *self.extras.sizes)
        return Signature((*self.x.names, *self.weights, *self.extras.names, "y"), sizes)


def emit_group_norm(module: Module, name: str, kernel: GroupNorm) -> Signature:
    with module.kernel(name, kernel.signature) as f:
        groups = f.args.size("groups")
        begin, end = f.share(f.args.size("batches") * groups)
        with f.loop(begin, end) as loop:
            batch, group = f.udiv(loop.index, groups), f.urem(loop.index, groups)
            _Group(f, kernel, batch, group, loop.index).emit()
    return kernel.signature


class _Group:
    def __init__(
        self, f: Kernel, kernel: GroupNorm, batch: Value, group: Value, row: Value
    ) -> None:
        self.f, self.kernel, self.batch, self.group, self.row = f, kernel, batch, group, row
        self.type: Type = computed(kernel.element)
        self.lanes = f.target.lanes(self.type.bits)
        self.channels, self.columns = f.args.size("channels"), f.args.size("columns")
        self.stats: list[Value] = []

    def emit(self) -> None:
        f = self.f
        formula = layer_norm(self.kernel.eps)
        count = f.convert(self.channels * self.columns, self.type)
        for step in formula.passes:
            start = f.const(self.type.vector(self.lanes), step.start)
            with f.loop(0, self.channels, carry=(start,) * ACCUMULATORS) as loop:
                row = self.kernel.x.at(f, (self.batch, self.group, loop.index), self.lanes)

                def fold(
                    column: Value,
                    mask: Value | None,
                    *totals: Value,
                    step: Pass = step,
                    row: Row = row,
                ) -> tuple[Value, ...]:
                    (v,) = row.load(column, mask)
                    total = step.accumulate(f, totals[0], v, self.stats)
                    if mask is not None:
                        total = f.select(mask, total, totals[0])
                    return (*totals[1:], total)

                loop.next(
                    *f.vectors(0, self.columns, self.lanes, fold, loop.carried, unroll=ACCUMULATORS)
                )
            total = f.reduce_add(f.combine(loop.results, f.add))
            self.stats.append(step.finish(f, total, count))
        with f.loop(0, self.channels) as loop:
            self._write(loop.index)

    def _write(self, channel: Value) -> None:
        f, kernel = self.f, self.kernel
        element = kernel.element
        at = self.group * self.channels + channel
        factor = self.stats[1]
        if kernel.has_scale:
            factor = factor * load_computed(f, element, 1, f.args.pointer("scale"), at)
        bias = f.const(self.type, 0.0)
        if kernel.has_bias:
            bias = load_computed(f, element, 1, f.args.pointer("bias"), at)
        index = (self.batch, self.group, channel)
        row, extras = (reads.at(f, index, self.lanes) for reads in (kernel.x, kernel.extras))
        start = (self.row * self.channels + channel) * self.columns
        y = f.gep(storage_type(kernel.after.dtype), f.args.pointer("y"), start)

        def body(column: Value, mask: Value | None) -> None:
            (v,) = row.load(column, mask)
            centred = v - f.splat(self.stats[0], self.lanes)
            result = f.fma(centred, factor, f.splat(bias, self.lanes))
            operands = [result, *extras.load(column, mask)]
            result = kernel.after.evaluate(f, operands, self.lanes)
            store(f, result, kernel.after.dtype, y, column, mask)

        f.vectors(0, self.columns, self.lanes, body, unroll=2)


@dataclass(frozen=True)
class BatchNorm(KernelParameters):
    """Operands x, scale, bias, mean, var, all in the shape of x."""

    element: DType
    eps: float
    x: Reads

    @property
    def signature(self) -> Signature:
        counts = [f"n{axis}" for axis in range(self.x.rank - 1)]
        return Signature((*self.x.names, "y"), (*counts, "columns", *self.x.sizes))


def emit_batch_norm(module: Module, name: str, kernel: BatchNorm) -> Signature:
    type_ = computed(kernel.element)
    with module.kernel(name, kernel.signature) as f:
        lanes = f.target.lanes(type_.bits)
        counts = [f.args.size(f"n{axis}") for axis in range(kernel.x.rank - 1)]
        columns = f.args.size("columns")
        begin, end = f.share(product(f, counts))
        with f.loop(begin, end) as loop:
            row = kernel.x.at(f, position(f, counts, loop.index), lanes)
            y = f.gep(storage_type(kernel.element), f.args.pointer("y"), loop.index * columns)

            def body(column: Value, mask: Value | None) -> None:
                loaded = [f.convert(v, type_) for v in row.load(column, mask)]
                x, scale, bias, mean, var = loaded
                factor = f.div(scale, f.sqrt(f.add(var, kernel.eps)))
                store(f, f.fma(f.sub(x, mean), factor, bias), kernel.element, y, column, mask)

            f.vectors(0, columns, lanes, body)
    return kernel.signature


@dataclass(frozen=True)
class Lrn(KernelParameters):
    """x has axes (batch, channel, column)."""

    element: DType
    size: int
    alpha: float
    beta: float
    bias: float
    x: Reads

    @property
    def signature(self) -> Signature:
        sizes = ("batches", "channels", "columns", *self.x.sizes)
        return Signature((*self.x.names, "y"), sizes)


def emit_lrn(module: Module, name: str, kernel: Lrn) -> Signature:
    type_ = computed(kernel.element)
    with module.kernel(name, kernel.signature) as f:
        lanes = f.target.lanes(type_.bits)
        channels, columns = f.args.size("channels"), f.args.size("columns")
        begin, end = f.share(f.args.size("batches") * channels)
        with f.loop(begin, end) as loop:
            batch, channel = f.udiv(loop.index, channels), f.urem(loop.index, channels)
            low = f.max(channel - (kernel.size - 1) // 2, 0)
            high = f.min(channel + (kernel.size // 2 + 1), channels)
            row = kernel.x.at(f, (batch, channel), lanes)
            y = f.gep(storage_type(kernel.element), f.args.pointer("y"), loop.index * columns)

            def body(column: Value, mask: Value | None) -> None:
                zero = f.const(type_.vector(lanes), 0.0)
                with f.loop(low, high, carry=(zero,), nonempty=True) as around:
                    near = kernel.x.at(f, (batch, around.index), lanes)
                    (v,) = near.load(column, mask)
                    around.next(f.fma(v, v, around.carried[0]))
                spread = f.fma(around.results[0], kernel.alpha / kernel.size, kernel.bias)
                (x,) = row.load(column, mask)
                result = f.div(x, _power(f, spread, kernel.beta))
                store(f, result, kernel.element, y, column, mask)

            f.vectors(0, columns, lanes, body)
    return kernel.signature


def _power(f: Kernel, x: Value, exponent: float) -> Value:
    if exponent == 0.75:  # the common case: two square roots
        root = f.sqrt(x)
        return f.mul(root, f.sqrt(root))
    return vector_math.pow_(f, x, f.as_value(exponent, x.type))
