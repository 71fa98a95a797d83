"""Optimizers: settings, and the nodes of their step for one parameter.

    bw.SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    bw.AdamW(lr=3e-4, weight_decay=0.1)

The formulas are PyTorch's (`ops.nn.optimizer`). Moments are states named `train.<moment>.<name>`.
Powers of Adam's betas are states in f64, because 1 - beta2 ** t in f32 loses digits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bitwright.errors import TrainingError
from bitwright.ir.graph import Value
from bitwright.ops.core.builder import Builder

PREFIX = "train."
"""The start of the names of states and inputs that the trainer adds."""


@dataclass(frozen=True)
class Scalars:
    """Scalars of one step: learning rate, factor of the gradients, whether it is applied."""

    rate: Value
    factor: Value
    apply: Value


@dataclass(frozen=True)
class Optimizer(ABC):
    """The settings that all optimizers share; `weight_decay` may differ by group of parameters."""

    lr: float

    def __post_init__(self) -> None:
        if not 0 <= self.lr < float("inf"):
            raise TrainingError("the learning rate is out of range", expected="≥ 0", found=self.lr)
        if not 0 <= self.decay < float("inf"):
            raise TrainingError("weight_decay is out of range", expected="≥ 0", found=self.decay)
        for beta in self.betas_used:
            if not 0 <= beta < 1:
                raise TrainingError("a beta is out of range", expected="0 ≤ beta < 1", found=beta)

    @property
    def decay(self) -> float:
        return float(getattr(self, "weight_decay", 0.0))

    @property
    def betas_used(self) -> Sequence[float]:
        return getattr(self, "betas", ())

    def begin(self, b: Builder, scalars: Scalars) -> dict[str, Value]:
        """Values that all parameters share in one step."""
        return {}

    @abstractmethod
    def update(
        self,
        b: Builder,
        p: Value,
        grad: Value,
        scalars: Scalars,
        shared: dict[str, Value],
        decay: float,
    ) -> Value:
        """Append the step of one parameter and its updates; returns the new parameter."""

    def _moment(self, b: Builder, kind: str, p: Value) -> Value:
        return b.state(f"{PREFIX}{kind}.{p.name}", type_=p.type)  # zeros at first


def _replace(b: Builder, old: Sequence[Value], new: Any) -> Value:
    """Updates of states by results of a node; returns the first result."""
    results = new if isinstance(new, tuple) else (new,)
    for state, value in zip(old, results, strict=True):
        b.update(state, value)
    first: Value = results[0]
    return first


@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent with momentum, Nesterov momentum and weight decay (L2)."""

    lr: float = 1e-2
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < float("inf"):
            raise TrainingError("momentum is out of range", expected="≥ 0", found=self.momentum)
        if self.nesterov and not self.momentum:
            raise TrainingError("Nesterov momentum needs momentum > 0")

    def update(
        self,
        b: Builder,
        p: Value,
        grad: Value,
        scalars: Scalars,
        shared: dict[str, Value],
        decay: float,
    ) -> Value:
        held = [self._moment(b, "momentum", p)] if self.momentum else []
        attrs = {"momentum": self.momentum, "nesterov": self.nesterov, "decay": decay}
        attrs["require_finite"] = True
        operands = p, grad, scalars.rate, scalars.factor, scalars.apply, *held
        return _replace(b, [p, *held], b.sgd_update(*operands, **attrs))


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam; weight decay is added to the gradient."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    @property
    def _is_decoupled(self) -> bool:
        return False

    def begin(self, b: Builder, scalars: Scalars) -> dict[str, Value]:
        """`step` = rate / (1 - beta1 ** t) without the factor of a group, and `root`."""
        corrections = []
        for number, beta in enumerate(self.betas, 1):
            power = b.state(f"{PREFIX}beta{number}_power", np.ones((), np.float64))
            new = b.where(scalars.apply, b.mul(power, float(beta)), power)
            b.update(power, new)
            corrections.append(b.sub(np.float64(1), b.mul(power, float(beta))))
        root = b.cast(b.sqrt(corrections[1]), to="f32")
        return {"inverse": b.reciprocal(corrections[0]), "root": root}

    def update(
        self,
        b: Builder,
        p: Value,
        grad: Value,
        scalars: Scalars,
        shared: dict[str, Value],
        decay: float,
    ) -> Value:
        m, v = self._moment(b, "exp_avg", p), self._moment(b, "exp_avg_sq", p)
        step = b.cast(b.mul(b.cast(scalars.rate, to="f64"), shared["inverse"]), to="f32")
        new = b.adam_update(
            p,
            grad,
            m,
            v,
            scalars.rate,
            step,
            shared["root"],
            scalars.factor,
            scalars.apply,
            beta1=self.betas[0],
            beta2=self.betas[1],
            eps=self.eps,
            decay=decay,
            decoupled=self._is_decoupled,
            require_finite=True,
        )
        return _replace(b, [p, m, v], new)


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay."""

    weight_decay: float = 1e-2

    @property
    def _is_decoupled(self) -> bool:
        return True


@dataclass(frozen=True)
class Lion(Optimizer):
    """Lion: the sign of an interpolated momentum, with decoupled weight decay."""

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0

    def update(
        self,
        b: Builder,
        p: Value,
        grad: Value,
        scalars: Scalars,
        shared: dict[str, Value],
        decay: float,
    ) -> Value:
        m = self._moment(b, "exp_avg", p)
        attrs = {"beta1": self.betas[0], "beta2": self.betas[1], "decay": decay}
        attrs["require_finite"] = True
        operands = p, grad, m, scalars.rate, scalars.factor, scalars.apply
        return _replace(b, [p, m], b.lion_update(*operands, **attrs))


OPTIMIZERS: dict[str, type[Optimizer]] = {
    "sgd": SGD,
    "adam": Adam,
    "adamw": AdamW,
    "lion": Lion,
}


def optimizer_of(given: Any) -> Optimizer:
    """An optimizer from an instance, or from its name with default settings."""
    if isinstance(given, Optimizer):
        return given
    if isinstance(given, str) and given.lower() in OPTIMIZERS:
        kind: Any = OPTIMIZERS[given.lower()]
        found: Optimizer = kind()
        return found
    raise TrainingError(
        "this is not an optimizer",
        expected=f"bw.SGD(...), bw.AdamW(...), or one of {', '.join(OPTIMIZERS)}",
        found=repr(given),
    )
