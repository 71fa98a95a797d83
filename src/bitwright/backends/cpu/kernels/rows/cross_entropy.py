"""Cross entropy and its gradient: parameters, labels, and sums over labels.

    loss      = weight · (ln Σ e^(v - top) + top - v[label]),         weight 0 of ignored labels
    dlogits   = dy · weight / divisor · (e^(v - top) / Σ e^(v - top) - [class is the label])

Logits are [rows, classes, columns]. `cross_entropy_rows` has the kernels for one column, where
lanes run along the classes, `cross_entropy_columns` those where lanes run along the columns. Sums
over labels are f64 partial sums of blocks of labels, which depend on sizes alone:

    emit_label_weights   the weights of each block of labels, for the divisor of a gradient
    emit_total           the loss: partial sums of losses, divided by those of weights

    slots   logits, labels   weights, if present          y      losses, partial sums, or dlogits
            dy, total        of gradients: dy, and the partial sums of weights, if needed
"""

from __future__ import annotations

from dataclasses import dataclass

from bitwright.backends.cpu.codegen.emit import Kernel, Module, Signature, Value, f64, i64
from bitwright.backends.cpu.codegen.emit.types import Type, computed, storage_type
from bitwright.backends.cpu.codegen.expression import load_computed, to_stored
from bitwright.backends.cpu.kernels.elementwise.loop_nest import pieces
from bitwright.backends.cpu.kernels.movement.fault import FAULT_SLOTS, record_fault
from bitwright.ir.dtype import DType

BLOCK = 64
"""Rows with partial sums of their own."""
PIECE = 1024
"""Columns with partial sums of their own."""
LABELS = 4096
"""Labels whose weights are added up by one thread."""


@dataclass(frozen=True)
class CrossEntropy:
    element: DType
    label: DType
    has_weights: bool
    ignore_index: int | None
    reduction: str
    from_log_probs: bool
    along_rows: bool
    is_gradient: bool

    @property
    def type(self) -> Type:
        return computed(self.element)

    @property
    def saves_powers(self) -> bool:
        """Whether e^(v - top) is saved in the result instead of computed twice."""
        return storage_type(self.element) is self.type

    @property
    def varies(self) -> bool:
        """Whether labels can have different weights."""
        return self.has_weights or self.ignore_index is not None

    @property
    def reads_total(self) -> bool:
        """Whether a gradient is divided by the sum of weights."""
        return self.is_gradient and self.reduction == "mean" and self.varies

    @property
    def signature(self) -> Signature:
        dy, total = ("dy",) * self.is_gradient, ("total",) * self.reads_total
        weights, blocks = ("weights",) * self.has_weights, ("blocks",) * self.reads_total
        sizes = ("rows", "classes", "columns", *blocks, *FAULT_SLOTS)
        return Signature((*dy, "logits", "labels", *weights, *total, "y", "fault"), sizes)

    @property
    def weights_signature(self) -> Signature:
        weights = ("weights",) * self.has_weights
        sizes = ("count", "classes", *FAULT_SLOTS)
        return Signature(("labels", *weights, "y", "fault"), sizes)


@dataclass(frozen=True)
class Label:
    """A label, or a vector of them."""

    number: Value
    """0 if the label is ignored or no class."""
    weight: Value
    is_ignored: Value | None


def read_labels(
    f: Kernel, form: CrossEntropy, at: Value, lanes: int = 1, mask: Value | None = None
) -> Label:
    """The labels at position `at`; a label that is no class is recorded as a fault."""
    classes, stored = f.args.size("classes"), storage_type(form.label)
    labels = f.args.pointer("labels")
    number = f.convert(f.load(stored.vector(lanes), labels, at, mask=mask), i64)
    outside = f.uge(number, f.splat(classes, lanes))
    if mask is not None:
        outside = f.and_(outside, mask)
    ignored = None
    if form.ignore_index is not None:
        ignored = f.eq(number, form.ignore_index)
        outside = f.and_(outside, f.not_(ignored))
    with f.if_(f.any(outside)):
        if lanes == 1:
            record_fault(f, number)
        else:
            lowest = f.reduce_min(f.select(outside, number, 0))
            highest = f.reduce_max(f.select(outside, number, 0))
            record_fault(f, f.select(f.lt(lowest, 0), lowest, highest))
    number = f.select(outside, 0, number)
    if ignored is not None:
        number = f.select(ignored, 0, number)
    return Label(number, _weight(f, form, number, ignored, mask), ignored)


def _weight(
    f: Kernel, form: CrossEntropy, number: Value, ignored: Value | None, mask: Value | None
) -> Value:
    lanes = number.type.lanes
    weight = f.const(form.type.vector(lanes), 1.0)
    if form.has_weights:
        some = f.gt(f.args.size("classes"), 0)
        inside = f.splat(some, lanes) if mask is None else f.and_(mask, f.splat(some, lanes))
        stored = storage_type(form.element).vector(lanes)
        weight = f.gather(stored, f.args.pointer("weights"), number, mask=inside)
        weight = f.convert(weight, form.type)
    return weight if ignored is None else f.select(ignored, 0.0, weight)


def factor_of(f: Kernel, form: CrossEntropy, label: Label, divisor: Value, dy: Value) -> Value:
    """dy · weight / divisor of a gradient."""
    return f.div(dy * label.weight, f.splat(divisor, label.number.type.lanes))


def load_dy(f: Kernel, form: CrossEntropy, at: Value, lanes: int, mask: Value | None) -> Value:
    """The gradients of the losses of some labels."""
    if form.reduction == "none":
        return load_computed(f, form.element, lanes, f.args.pointer("dy"), at, mask=mask)
    return f.splat(load_computed(f, form.element, 1, f.args.pointer("dy")), lanes)


def divisor_of(f: Kernel, form: CrossEntropy) -> Value:
    """The number that gradients are divided by."""
    if form.reduction != "mean":
        return f.const(form.type, 1.0)
    if not form.reads_total:
        return f.convert(f.args.size("rows") * f.args.size("columns"), form.type)
    total = f.args.pointer("total")
    with f.loop(0, f.args.size("blocks"), carry=(f.const(f64, 0.0),)) as loop:
        loop.next(loop.carried[0] + f.load(f64, total, loop.index))
    return f.convert(loop.results[0], form.type)


def emit_label_weights(module: Module, name: str, form: CrossEntropy) -> Signature:
    """Emit the kernel that sums the weights of each block of `LABELS` labels."""
    with module.kernel(name, form.weights_signature) as f:
        count = f.args.size("count")
        begin, end = f.share(pieces(f, count, LABELS))
        with f.loop(begin, end) as blocks:
            first = blocks.index * LABELS
            stop = f.min(first + LABELS, count)
            with f.loop(first, stop, carry=(f.const(f64, 0.0),)) as loop:
                weight = read_labels(f, form, loop.index).weight
                loop.next(loop.carried[0] + f.convert(weight, f64))
            f.store(loop.results[0], f.args.pointer("y"), blocks.index)
    return form.weights_signature


TOTAL = Signature(("x", "y"), ("units",))


def emit_total(module: Module, name: str, element: DType, is_mean: bool) -> Signature:
    """Emit the kernel that adds up pairs of losses and weights; one thread runs it."""
    with module.kernel(name, TOTAL) as f:
        begin, end = f.share(1)
        with f.loop(begin, end):
            zero = f.const(f64, 0.0)
            with f.loop(0, f.args.size("units"), carry=(zero, zero)) as loop:
                pair = [f.load(f64, f.args.pointer("x"), loop.index * 2 + i) for i in range(2)]
                loop.next(*(a + b for a, b in zip(loop.carried, pair, strict=True)))
            loss, weight = loop.results
            loss = f.div(loss, weight) if is_mean else loss
            f.store(to_stored(f, f.convert(loss, computed(element)), element), f.args.pointer("y"))
    return TOTAL
