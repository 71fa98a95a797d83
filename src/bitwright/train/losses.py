"""Losses: nodes behind the outputs of a forward graph that reduce them to one number.

    "cross_entropy"        logits [n, classes, ...], labels i64 [n, ...]
    "token_cross_entropy"  logits [..., classes], labels i64 [...]; label -100 is ignored
    "binary_cross_entropy" logits, targets of the same shape
    "mse", "l1", "cosine"  an output and targets of the same shape

Labels become inputs of the graph, named "labels" unless `labels=` says otherwise. A loss can also
be the name of an output of the graph, or a function `loss(b, outputs)` on builder values, which
may add inputs by `b.input(name, type)`. Distillation compares outputs with those of a teacher:
by "kl" (of logits) or by a comparison of `train.comparisons`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import isfunction
from typing import Any

from bitwright.errors import TrainingError
from bitwright.ir.arrays import Array
from bitwright.ir.dtype import f32, i64
from bitwright.ir.graph import Graph, Value, nearest
from bitwright.ir.types import TensorType
from bitwright.ops.core.builder import Builder
from bitwright.train.comparisons import COMPARISONS, Comparison, mean
from bitwright.train.optimizers import PREFIX
from bitwright.train.schedules import name_of

TEACHER = f"{PREFIX}teacher."
IGNORED = -100
CLASSES = {"cross_entropy": 1, "token_cross_entropy": -1}
"""The axis of classes in the logits, for losses whose labels are classes."""
Outputs = Mapping[str, Value]
LossFunction = Callable[[Builder, Outputs], Value]


@dataclass(frozen=True)
class Attached:
    """A loss in a graph: its value, further numbers to report, and the inputs that it added."""

    loss: Value
    metrics: dict[str, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class Loss:
    """What the trainer minimizes; `kind` is a name of `LOSSES`, an output or a function."""

    kind: str | LossFunction | None = None
    output: str | None = None
    """The output that a named loss reads; the only one by default."""
    labels: str = "labels"
    distillation: Mapping[str, str | Comparison] = field(default_factory=dict)
    """For each output, how it is compared with the teacher's: "kl", a name of `COMPARISONS`, or a
    function."""
    temperature: float = 1.0
    weight: float = 1.0
    """Weight of the distillation beside a loss of labels."""

    def attach(self, b: Builder, outputs: Outputs) -> Attached:
        """Append the loss to a builder that holds the forward graph."""
        parts: list[Value] = []
        metrics: dict[str, Value] = {}
        if callable(self.kind):
            parts.append(self.kind(b, outputs))
        elif self.kind is not None and self.kind in outputs:
            parts.append(outputs[self.kind])
        elif self.kind is not None:
            found = LOSSES[self.kind](b, self._output(outputs), self.labels)
            parts.append(found.loss)
            metrics |= found.metrics
        for name, how in self.distillation.items():
            part = self._compare(b, outputs[name], name, how)
            parts.append(part if self.weight == 1 else b.mul(part, float(self.weight)))
        total = parts[0]
        for part in parts[1:]:
            total = b.add(total, part)
        return Attached(_as_number(b, total), metrics)

    @property
    def comparisons(self) -> dict[str, str]:
        """The comparisons with the teacher as text that is the same in another process."""
        return {
            name: name_of(how) if isfunction(how) else str(how)
            for name, how in self.distillation.items()
        }

    def require_labels(self, batch: Mapping[str, Array], outputs: Outputs) -> None:
        """Raise a `TrainingError` for a label that is not a class."""
        axis = CLASSES.get(self.kind) if isinstance(self.kind, str) else None
        labels = batch.get(self.labels)
        if axis is None or self.kind in outputs or labels is None or not labels.size:
            return
        count = self._output(outputs).shape[axis]
        is_wrong = (labels < 0) | (labels >= count if isinstance(count, int) else False)
        ignored = ""
        if self.kind == "token_cross_entropy":
            is_wrong &= labels != IGNORED
            ignored = f", or {IGNORED} to ignore one"
        if is_wrong.any():
            raise TrainingError(
                f"a label in {self.labels!r} is not a class",
                expected=f"0 to {count - 1}{ignored}",
                found=labels[is_wrong].reshape(-1)[0],
            )

    def _output(self, outputs: Outputs) -> Value:
        if self.output is not None:
            return outputs[self.output]
        return next(iter(outputs.values()))

    def _compare(self, b: Builder, y: Value, name: str, how: str | Comparison) -> Value:
        y = _full(b, y)
        t = b.input(TEACHER + name, TensorType(f32, y.shape))
        if callable(how):
            return _as_number(b, how(b, y, t))
        if how != "kl":
            return COMPARISONS[how](b, y, t)
        axis = -1 if y.rank < 4 else 1
        logs = [b.log_softmax(b.div(v, float(self.temperature)), axis=axis) for v in (y, t)]
        terms = b.mul(b.exp(logs[1]), b.sub(logs[1], logs[0]))
        divergence = mean(b, b.reduce_sum(terms, axes=[axis], keepdims=False))
        return b.mul(divergence, float(self.temperature) ** 2)  # type: ignore[no-any-return]


def loss_of(
    graph: Graph,
    given: Any,
    output: str | None,
    labels: str,
    teacher: Graph | None,
    distillation: Any,
    temperature: float,
    weight: float,
) -> Loss:
    """The loss of a trainer, checked against the outputs of its graph."""
    names = dict(graph.outputs)
    if given is None and teacher is None:
        raise TrainingError(
            "there is neither a loss nor a teacher",
            expected=f"a loss (loss=, --loss), one of {_choices(graph)}",
        )
    if given is not None and not callable(given) and given not in {*LOSSES, *names}:
        raise TrainingError(
            f"there is no loss {given!r}",
            expected=f"a function, or one of {_choices(graph)}",
            hint=nearest(str(given), [*LOSSES, *names]),
        )
    is_named = isinstance(given, str) and given not in names
    if output is not None and output not in names:
        raise TrainingError(
            f"graph {graph.name!r} has no output {output!r} for the loss",
            expected=" or ".join(names),
            hint=nearest(output, names),
        )
    if is_named and output is None and len(names) > 1:
        raise TrainingError(
            f"graph {graph.name!r} has several outputs",
            expected=f"the one of the loss (output=, --loss-output): {', '.join(names)}",
        )
    compared = _compared(graph, teacher, distillation) if teacher is not None else {}
    return Loss(given, output, labels, compared, temperature, weight)


def _choices(graph: Graph) -> str:
    return ", ".join([*LOSSES, *(name for name, _ in graph.outputs)])


def _compared(graph: Graph, teacher: Graph, given: Any) -> dict[str, str | Comparison]:
    """How each output is compared with the teacher's."""
    theirs = dict(teacher.outputs)
    shared = [name for name, _ in graph.outputs if name in theirs]
    chosen = given if isinstance(given, Mapping) else dict.fromkeys(shared, given or "kl")
    for name, how in chosen.items():
        if name not in shared:
            raise TrainingError(
                f"output {name!r} cannot be compared with the teacher's",
                expected=" or ".join(shared) or "an output that both graphs have",
            )
        if not callable(how) and how != "kl" and how not in COMPARISONS:
            raise TrainingError(
                f"there is no comparison {how!r} with a teacher",
                expected=", ".join(("kl", *COMPARISONS, "a function")),
            )
    if not chosen:
        raise TrainingError("the teacher has no output in common with the graph")
    return dict(chosen)


def label_input(b: Builder, name: str, type_: TensorType) -> Value:
    """The input of labels; one that the graph already has is used."""
    for node in b.nodes:
        if node.op == "input" and node.name == name:
            return node.outputs[0]
    return b.input(name, type_)


def _full(b: Builder, y: Value) -> Value:
    return y if y.dtype.bits >= 32 else b.cast(y, to=f32)


def _as_number(b: Builder, loss: Value) -> Value:
    """The loss in f32 and without axes."""
    if not isinstance(loss, Value) or not loss.dtype.is_float:
        raise TrainingError("the loss is not a real number", found=repr(loss))
    if any(size != 1 for size in loss.shape):
        raise TrainingError(
            "the loss is not one number",
            found=repr(loss),
            hint="Reduce it, for example by reduce_mean.",
        )
    loss = b.reshape(loss, shape=()) if loss.rank else loss
    return loss if loss.dtype == f32 else b.cast(loss, to=f32)


def _cross_entropy(b: Builder, logits: Value, labels: str) -> Attached:
    logits = _full(b, logits)
    if logits.rank < 2:
        raise TrainingError("cross_entropy needs logits [n, classes, ...]", found=repr(logits))
    shape = (logits.shape[0], *logits.shape[2:])
    targets = label_input(b, labels, TensorType(i64, shape))
    loss = b.cross_entropy(logits, targets)
    right = b.eq(b.argmax(logits, axis=1, keepdims=False), targets)
    return Attached(loss, {"accuracy": mean(b, b.cast(right, to=f32))})


def _token_cross_entropy(b: Builder, logits: Value, labels: str) -> Attached:
    logits = _full(b, logits)
    targets = label_input(b, labels, TensorType(i64, logits.shape[:-1]))
    rows = b.reshape(logits, shape=(targets.tensor.count, logits.shape[-1]))
    flat = b.reshape(targets, shape=(targets.tensor.count,))
    return Attached(b.cross_entropy(rows, flat, ignore_index=IGNORED))


def _binary_cross_entropy(b: Builder, y: Value, labels: str) -> Attached:
    """(1 - t) * log(1 + exp(y)) + t * log(1 + exp(-y)).

    Forms with |y| have no gradient at y = 0, where training often starts.
    """
    y = _full(b, y)
    t = label_input(b, labels, y.tensor)
    absent = b.mul(b.sub(1.0, t), b.softplus(y))
    present = b.mul(t, b.softplus(b.neg(y)))
    return Attached(mean(b, b.add(absent, present)))


def _with_targets(compare: Comparison) -> Any:
    def loss(b: Builder, y: Value, labels: str) -> Attached:
        y = _full(b, y)
        return Attached(compare(b, y, label_input(b, labels, y.tensor)))

    return loss


LOSSES: dict[str, Callable[[Builder, Value, str], Attached]] = {
    "cross_entropy": _cross_entropy,
    "token_cross_entropy": _token_cross_entropy,
    "binary_cross_entropy": _binary_cross_entropy,
    **{name: _with_targets(compare) for name, compare in COMPARISONS.items()},
}
