"""Steps of optimizers: one pass over a parameter, its gradient and its moments.

Every element is read before it is written, so results may be written in place. `ops.nn.optimizer`
has the formulas. Elements whose gradient must be finite and is not stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bitwright.backends.cpu.codegen.emit import Kernel, Module, Signature, Value, f32, i8
from bitwright.backends.cpu.codegen.emit.types import computed
from bitwright.backends.cpu.kernels.movement.fault import FAULT_SLOTS, record_fault
from bitwright.ir.dtype import DType

TENSORS = {
    "sgd_update": ("p", "grad", "m"),
    "adam_update": ("p", "grad", "m", "v"),
    "lion_update": ("p", "grad", "m"),
}
SCALARS = {
    "sgd_update": ("rate", "factor"),
    "adam_update": ("rate", "step", "root", "factor"),
    "lion_update": ("rate", "factor"),
}
Vectors = dict[str, Value]


@dataclass(frozen=True)
class Update:
    """The kernel of one update op: its tensors and attributes are part of the code."""

    op: str
    element: DType
    tensors: tuple[str, ...]
    attrs: tuple[tuple[str, Any], ...]

    @property
    def results(self) -> tuple[str, ...]:
        return tuple(name for name in self.tensors if name != "grad")

    @property
    def requires_finite(self) -> bool:
        return bool(dict(self.attrs)["require_finite"])

    @property
    def signature(self) -> Signature:
        pointers = *self.tensors, *SCALARS[self.op], "apply", *(f"new_{r}" for r in self.results)
        if self.requires_finite:
            return Signature((*pointers, "fault"), ("count", *FAULT_SLOTS))
        return Signature(pointers, ("count",))


def emit_update(module: Module, name: str, update: Update) -> Signature:
    """The results of an update op for this thread's part of the elements."""
    signature = update.signature
    scalar = computed(update.element)
    attrs = dict(update.attrs)
    with module.kernel(name, signature) as f:
        lanes = f.target.lanes(scalar.bits)
        given = {
            slot: f.splat(f.convert(f.load(f32, f.args.pointer(slot)), scalar), lanes)
            for slot in SCALARS[update.op]
        }
        apply = f.splat(f.ne(f.load(i8, f.args.pointer("apply")), 0), lanes)
        begin, end = f.share(f.args.size("count"), 64)

        def body(at: Value, mask: Value | None) -> None:
            vector = scalar.vector(lanes)
            old = {t: f.load(vector, f.args.pointer(t), at, mask=mask) for t in update.tensors}
            new = FORMULAS[update.op](f, {**old, **given}, attrs)
            is_new = _finite(f, old["grad"], apply, at) if update.requires_finite else apply
            for result in update.results:
                chosen = f.select(is_new, new[result], old[result])
                f.store(chosen, f.args.pointer(f"new_{result}"), at, mask=mask)

        f.vectors(begin, f.max(begin, end), lanes, body)
    return signature


def _finite(f: Kernel, gradient: Value, apply: Value, at: Value) -> Value:
    """Where a step is applied; a gradient there that is not finite is recorded as a fault."""
    is_new = f.and_(apply, f.lt(f.abs(gradient), math.inf))
    with f.if_(f.any(f.and_(apply, f.not_(is_new)))):
        record_fault(f, at)
    return is_new


def _sgd(f: Kernel, x: Vectors, attrs: Mapping[str, Any]) -> Vectors:
    g, new = x["grad"] * x["factor"], {}
    if attrs["decay"]:
        g = g + x["p"] * attrs["decay"]
    if "m" in x:
        new["m"] = x["m"] * attrs["momentum"] + g
        g = g + new["m"] * attrs["momentum"] if attrs["nesterov"] else new["m"]
    return {**new, "p": x["p"] - x["rate"] * g}


def _decayed(f: Kernel, x: Vectors, decay: float) -> Value:
    """p after decoupled weight decay."""
    return x["p"] * f.sub(1.0, x["rate"] * decay) if decay else x["p"]


def _adam(f: Kernel, x: Vectors, attrs: Mapping[str, Any]) -> Vectors:
    p, g = x["p"], x["grad"] * x["factor"]
    if attrs["decoupled"]:
        p = _decayed(f, x, attrs["decay"])
    elif attrs["decay"]:
        g = g + p * attrs["decay"]
    m = x["m"] + (g - x["m"]) * (1 - attrs["beta1"])
    v = x["v"] * attrs["beta2"] + g * g * (1 - attrs["beta2"])
    denominator = f.div(f.sqrt(v), x["root"]) + attrs["eps"]
    return {"p": p - f.div(x["step"] * m, denominator), "m": m, "v": v}


def _lion(f: Kernel, x: Vectors, attrs: Mapping[str, Any]) -> Vectors:
    g = x["grad"] * x["factor"]
    direction = x["m"] * attrs["beta1"] + g * (1 - attrs["beta1"])
    size = f.select(f.eq(direction, 0.0), direction, f.copysign(x["rate"], direction))
    m = x["m"] * attrs["beta2"] + g * (1 - attrs["beta2"])
    return {"p": _decayed(f, x, attrs["decay"]) - size, "m": m}


FORMULAS: dict[str, Callable[[Kernel, Vectors, Mapping[str, Any]], Vectors]] = {
    "sgd_update": _sgd,
    "adam_update": _adam,
    "lion_update": _lion,
}
