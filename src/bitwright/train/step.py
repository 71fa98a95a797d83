"""The training step as one graph.

    forward -> loss -> gradients -> (accumulators) -> clipping by norm -> optimizer -> updates

Trainable parameters, moments, averages, accumulators, counters, the loss scale and running
statistics are states with updates. The learning rate is the input `train.lr`. A step whose loss is
not finite changes nothing but the loss scale; nor does one whose gradients are not finite, where
their norm is known (f16, clipping). Elsewhere the updates find such a gradient (`require_finite`):
the step is an error, and what that gradient would have changed stays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from bitwright.errors import TrainingError
from bitwright.ir.graph import Graph, Node, Value
from bitwright.ops.control.control_gradients import stack_carried
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.check import verify
from bitwright.ops.core.gradients import full_like
from bitwright.ops.core.reverse import backpropagate
from bitwright.ops.sequence.recurrent_rules import keep_gates
from bitwright.passes.expand_fake_quantize import expand_fake_quantize
from bitwright.passes.manager import Pass, run_passes
from bitwright.passes.precision.apply import apply_precision
from bitwright.passes.precision.policy import Policy, custom
from bitwright.pipeline import SIMPLIFY
from bitwright.train.groups import is_trainable, value_of
from bitwright.train.losses import Attached, Loss
from bitwright.train.modes import Rebuild, eval_mode, train_mode
from bitwright.train.optimizers import PREFIX, Optimizer, Scalars
from bitwright.train.quantized_activations import straight_through

RATE = f"{PREFIX}lr"
STEP = f"{PREFIX}step"
SCALE = f"{PREFIX}scale"
GOOD = f"{PREFIX}good_steps"
AVERAGE = f"{PREFIX}ema."
SUM = f"{PREFIX}sum."
LOSS, NORM = "loss", "grad_norm"
FIRST_SCALE, GROWTH, INTERVAL = 2.0**15, 2.0, 2000
PRECISIONS = ("f32", "bf16", "f16")


@dataclass(frozen=True)
class Settings:
    """What a step does besides the forward graph and its loss."""

    optimizer: Optimizer
    precision: str = "f32"
    clip: float | None = None
    accumulate: int = 1
    ema: float | None = None
    decay: Mapping[str, float] = field(default_factory=dict)
    rates: Mapping[str, float] = field(default_factory=dict)
    batch_norm_momentum: float | None = 0.1
    seed: int = 0
    passes: Sequence[Pass] = ()
    frozen: Sequence[str] = ()
    """Patterns of parameters and running statistics that stay."""

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise TrainingError(
                f"there is no precision {self.precision!r} of training",
                expected=", ".join(PRECISIONS),
            )
        for what, value, is_right, expected in (
            ("clip", self.clip, self.clip is None or self.clip > 0, "a norm above 0"),
            ("accumulate", self.accumulate, self.accumulate >= 1, "at least 1 batch"),
            ("ema", self.ema, self.ema is None or 0 < self.ema < 1, "a factor between 0 and 1"),
        ):
            if not is_right:
                raise TrainingError(f"{what} is out of range", expected=expected, found=value)


def simplified(graph: Graph) -> Graph:
    """The forward graph with composites recognized and parameters kept."""
    return run_passes(graph, SIMPLIFY)


def step_graph(simple: Graph, loss: Loss, settings: Settings, is_last: bool = True) -> Graph:
    """The graph of a step; without `is_last` it only adds gradients to the accumulators."""
    exact = train_mode(simple, settings.batch_norm_momentum, settings.seed, settings.frozen)
    forward = straight_through(exact)
    if forward is not exact and expand_fake_quantize not in settings.passes:
        settings = replace(settings, passes=(expand_fake_quantize, *settings.passes))
    forward = _in_precision(forward, settings.precision)
    names = [v.name for v in forward.parameters if is_trainable(v)]
    forward = _keep_for_gradients(with_states(forward, names), names)
    return _Step(forward, names, loss, settings).build(is_last)


def _keep_for_gradients(graph: Graph, names: Sequence[str]) -> Graph:
    """The graph in which loops and recurrent layers also give what their gradients read."""
    graph = stack_carried(graph, [graph.value(name) for name in names])
    return keep_gates(graph, [graph.value(name) for name in names])


def eval_graph(simple: Graph, loss: Loss | None, held: Sequence[str], passes: Any = ()) -> Graph:
    """The graph in evaluation: all outputs, the loss and metrics; `held` parameters are states."""
    graph = with_states(eval_mode(simple), held)
    if loss is not None:
        b = Builder.of(graph)
        attached = loss.attach(b, dict(graph.outputs))
        for name, value in {LOSS: attached.loss, **attached.metrics}.items():
            b.outputs[PREFIX + name] = value
        graph = b.build()
    return run_passes(graph, passes) if passes else verify(graph)


def with_states(graph: Graph, names: Sequence[str]) -> Graph:
    """The graph with these parameters as states of the same name and value."""
    wanted, edit = set(names), Rebuild(graph)
    for node in graph.nodes:
        if node.op == "parameter" and node.name in wanted:
            if node.attrs.get("value") is None:
                raise TrainingError(
                    f"parameter {node.name!r} has no value", hint="Load or initialize its weights."
                )
            attrs = {"value": node.attrs["value"]}
            edit.put(node, edit.b.append(node.with_(op="state", attrs=attrs)).outputs)
        else:
            edit.keep(node)
    return edit.finish({})


def _in_precision(graph: Graph, precision: str) -> Graph:
    """Products and elementwise ops in a half type, reductions in f32; weights stay f32."""
    if precision == "f32":
        return graph
    kinds = {"compute": precision, "elementwise": precision, "movement": precision}
    chosen: Policy = custom(kinds=kinds)
    return apply_precision(graph, chosen)


class _Step:
    """Builds the step graph behind a forward graph whose trainable parameters are states."""

    def __init__(
        self, forward: Graph, names: Sequence[str], loss: Loss, settings: Settings
    ) -> None:
        self.forward, self.settings = forward, settings
        self.b = Builder.of(forward)
        self.b.outputs, self.b.updates = {}, []
        self.weights = [forward.value(name) for name in names]
        self.attached = loss.attach(self.b, dict(forward.outputs))
        self.nodes = list(self.b.nodes)
        self.is_scaled = settings.precision == "f16"

    def build(self, is_last: bool) -> Graph:
        b, loss = self.b, self.attached.loss
        self.scale = b.state(SCALE, np.float32(FIRST_SCALE)) if self.is_scaled else None
        gradients = self._gradients(self.attached)
        is_finite = _finite(b, loss)
        self._forward_updates(is_finite)
        if self.settings.accumulate > 1:
            gradients = self._accumulated(gradients, is_last)
        b.output(LOSS, loss)
        if is_last:
            self._optimize(gradients, is_finite)
        graph = verify(b.build())
        return run_passes(graph, self.settings.passes) if self.settings.passes else graph

    def _gradients(self, attached: Attached) -> dict[Value, Value]:
        b, loss = self.b, attached.loss
        _require_used(self.nodes, self.weights, loss)
        seed = self.scale if self.scale is not None else b.constant(np.float32(1), name="one")
        found = backpropagate(b, self.nodes, {loss: seed}, self.weights)
        if lost := [w.name for w in self.weights if w not in found]:
            raise TrainingError(
                f"no gradient reaches {_listed(lost)}: all paths go through integers",
                hint="A quantized model is trained by bw.prepare_qat (--qat). Otherwise freeze "
                f"such parameters: freeze={lost[:3]!r}.",
            )
        return {w: found[w] for w in self.weights}

    def _forward_updates(self, is_finite: Value) -> None:
        """Updates of the forward graph: running statistics, counters, observers."""
        for state, value in self.forward.updates:
            is_kept = state is value or state.name.startswith(PREFIX) or not _is_float(state)
            self.b.update(state, value if is_kept else self.b.where(is_finite, value, state))

    def _accumulated(self, gradients: dict[Value, Value], is_last: bool) -> dict[Value, Value]:
        b = self.b
        found = {}
        for weight, gradient in gradients.items():
            held = b.state(SUM + weight.name, type_=weight.type)  # zeros at first
            found[weight] = b.add(held, gradient)
            b.update(held, full_like(b, 0.0, weight) if is_last else found[weight])
        return found

    def _optimize(self, gradients: dict[Value, Value], is_finite: Value) -> None:
        b, settings = self.b, self.settings
        factor = b.constant(np.float32(1 / settings.accumulate), name="factor")
        if self.scale is not None:
            factor = b.div(factor, self.scale)
        apply = is_finite
        if settings.clip is not None or self.is_scaled:
            norm = b.mul(self._norm(list(gradients.values())), factor)
            b.output(NORM, norm)
            apply = b.and_(apply, _finite(b, norm))
            if settings.clip is not None:
                part = b.div(float(settings.clip), b.add(norm, 1e-6))
                factor = b.mul(factor, b.minimum(part, 1.0))
        rate = b.input(RATE, "f32[]")
        scalars = Scalars(rate, factor, apply)
        shared = settings.optimizer.begin(b, scalars)
        new = {w: self._update(w, g, scalars, shared) for w, g in gradients.items()}
        if settings.ema is not None:
            self._average(new, apply)
        step = b.state(STEP, np.zeros((), np.int64))
        b.update(step, b.add(step, b.cast(apply, to="i64")))
        if self.scale is not None:
            self._rescale(self.scale, apply)

    def _norm(self, gradients: list[Value]) -> Value:
        """The norm of all gradients together, before the factor."""
        b = self.b
        total: Value | None = None
        for gradient in gradients:
            axes = tuple(range(gradient.rank))
            square = b.mul(gradient, gradient)
            part = b.reduce_sum(square, axes=axes, keepdims=False) if axes else square
            part = b.cast(part, to="f32") if part.dtype.name != "f32" else part
            total = part if total is None else b.add(total, part)
        return b.sqrt(total)  # type: ignore[no-any-return]

    def _update(self, w: Value, g: Value, scalars: Scalars, shared: dict[str, Value]) -> Value:
        settings = self.settings
        decay = value_of(w.name, settings.decay, settings.optimizer.decay)
        factor = value_of(w.name, settings.rates, 1.0)
        if factor != 1.0:
            scalars = Scalars(self.b.mul(scalars.rate, factor), scalars.factor, scalars.apply)
        return settings.optimizer.update(self.b, w, g, scalars, shared, decay)

    def _average(self, new: dict[Value, Value], apply: Value) -> None:
        """Exponential moving averages: e' = e + (1 - decay) * (w - e)."""
        b, decay = self.b, self.settings.ema
        assert decay is not None
        part = b.where(apply, np.float32(1 - decay), np.float32(0))
        for old, weight in new.items():
            average = b.state(AVERAGE + old.name, old.node.attrs["value"])
            share = part if old.dtype.name == "f32" else b.cast(part, to=old.dtype)
            b.update(average, b.add(average, b.mul(b.sub(weight, average), share)))

    def _rescale(self, scale: Value, apply: Value) -> None:
        """Halve the loss scale after an overflow, double it after many steps without one."""
        b = self.b
        good = b.state(GOOD, np.zeros((), np.int64))
        count = b.add(good, 1)
        is_long = b.ge(count, INTERVAL)
        grown = b.where(is_long, b.mul(scale, GROWTH), scale)
        b.update(scale, b.where(apply, grown, b.mul(scale, 1 / GROWTH)))
        zero = np.zeros((), np.int64)
        b.update(good, b.where(b.and_(apply, b.not_(is_long)), count, zero))


def _finite(b: Builder, x: Value) -> Value:
    return b.lt(b.abs(x), math.inf)  # type: ignore[no-any-return]


def _is_float(value: Value) -> bool:
    return value.dtype.is_float


def _require_used(nodes: Sequence[Node], weights: Sequence[Value], loss: Value) -> None:
    """Raise a `TrainingError` that names parameters on which the loss does not depend."""
    if not weights:
        raise TrainingError(
            "there is no trainable parameter", hint="Unfreeze some, or add adapters."
        )
    needed = {loss}
    for node in reversed(nodes):
        if any(value in needed for value in node.outputs):
            needed.update(node.operands)
    unused = [value.name for value in weights if value not in needed]
    if unused:
        raise TrainingError(
            f"the loss does not depend on {_listed(unused)}",
            hint=f"Freeze such parameters: freeze={unused[:3]!r}.",
        )


def _listed(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more
