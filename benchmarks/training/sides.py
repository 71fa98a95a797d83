"""One training step of a recipe, by PyTorch and by bitwright.

    side = make_side("eager", recipe, threads=2, seed=0)
    side.start()
    loss = side.step((x, labels), rate)
    logits = side.predict(x)

All sides start from the same weights, those of the PyTorch module made with the seed.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import bitwright as bw
from training.recipes import Batch, Recipe

Array = np.ndarray
MOMENTUM = 0.9


class Side(Protocol):
    def start(self) -> None:
        """Make what a training step needs besides the model."""

    def step(self, batch: Batch, rate: float) -> float: ...

    def predict(self, x: Array) -> Array: ...


def make_side(name: str, recipe: Recipe, threads: int, seed: int, precision: str = "f32") -> Side:
    """The side `bitwright`, `eager` or `compiled` at the start of a training."""
    torch.manual_seed(seed)
    module = recipe.module()
    if name == "bitwright":
        return BitwrightSide(recipe, module, threads, seed, precision)
    return PytorchSide(recipe, module, threads, name == "compiled", precision)


class PytorchSide:
    """PyTorch with its fused optimizers."""

    def __init__(
        self, recipe: Recipe, module: nn.Module, threads: int, is_compiled: bool, precision: str
    ) -> None:
        torch.set_num_threads(threads)
        self.recipe, self.module, self.precision = recipe, module.train(), precision
        self.is_compiled = is_compiled

    def start(self) -> None:
        module, recipe = self.module, self.recipe
        self.run = torch.compile(module) if self.is_compiled else module
        self.optimizer: Any
        if recipe.optimizer == "sgd":
            self.optimizer = torch.optim.SGD(
                module.parameters(), recipe.rate, MOMENTUM, nesterov=True,
                weight_decay=recipe.decay, fused=True,
            )  # fmt: skip
        else:
            self.optimizer = torch.optim.AdamW(
                module.parameters(), recipe.rate, weight_decay=recipe.decay, fused=True
            )

    def step(self, batch: Batch, rate: float) -> float:
        x, labels = map(torch.from_numpy, batch)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        is_half = self.precision == "bf16"
        with torch.autocast("cpu", torch.bfloat16, enabled=is_half):
            logits = self.run(x)
        logits = logits.float() if is_half else logits
        loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if self.recipe.clip is not None:
            nn.utils.clip_grad_norm_(self.module.parameters(), self.recipe.clip)
        self.optimizer.step()
        return float(loss.detach())

    def predict(self, x: Array) -> Array:
        self.module.eval()
        with torch.no_grad():
            found = self.module(torch.from_numpy(x)).numpy()
        self.module.train()
        return found


class BitwrightSide:
    """bitwright on the imported module."""

    def __init__(
        self, recipe: Recipe, module: nn.Module, threads: int, seed: int, precision: str
    ) -> None:
        self.recipe, self.graph = recipe, imported(recipe, module)
        self.options: Any = {"threads": threads, "seed": seed, "precision": precision}

    def start(self) -> None:
        self.trainer = make_trainer(self.recipe, self.graph, **self.options)

    def step(self, batch: Batch, rate: float) -> float:
        trainer = self.trainer
        x, labels = batch
        name = trainer.program.simple.inputs[0].name
        return trainer.program.run([{name: x, "labels": labels}], rate)["loss"]

    def predict(self, x: Array) -> Array:
        name = self.trainer.program.simple.inputs[0].name
        (found,) = self.trainer.predict({name: x}).values()
        return found


def imported(recipe: Recipe, module: nn.Module) -> bw.Graph:
    """The graph of a module, with a free batch size."""
    x, _ = next(recipe.batches(0, 0))
    free = ({0: "batch"},)
    return bw.from_torch(module.eval(), (torch.from_numpy(x),), dynamic_shapes=free)


def make_trainer(recipe: Recipe, graph: bw.Graph, **options: Any) -> bw.Trainer:
    """A trainer of the imported module with the recipe's loss and optimizer."""
    optimizer: Any = (
        bw.SGD(recipe.rate, MOMENTUM, nesterov=True, weight_decay=recipe.decay)
        if recipe.optimizer == "sgd"
        else bw.AdamW(recipe.rate, weight_decay=recipe.decay)
    )
    loss = "token_cross_entropy" if recipe.metric == "perplexity" else "cross_entropy"
    return bw.Trainer(graph, loss=loss, optimizer=optimizer, clip=recipe.clip, **options)
