"""What is trained, how and on what: the same for PyTorch and for bitwright.

A recipe names the module, the optimizer with its schedule, and the batches of each epoch, which
depend on the seed alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
from torch import nn

from training import data, models

Array = np.ndarray
Batch = tuple[Array, Array]


@dataclass(frozen=True)
class Recipe:
    name: str
    module: Callable[[], nn.Module]
    batches: Callable[[int, int], Iterator[Batch]]
    """Batches of an epoch, by seed and number of the epoch."""
    steps: int
    """Steps of an epoch."""
    epochs: int
    optimizer: str
    """"sgd" (momentum 0.9, Nesterov) or "adamw"."""
    rate: float
    decay: float
    test: Callable[[], Batch]
    warm_up: float = 0.15
    """The part of all steps with a linearly growing rate; a cosine to zero follows."""
    metric: str = "accuracy"
    clip: float | None = None

    def rate_at(self, step: int, total: int | None = None) -> float:
        """The learning rate of a step, counted from 0."""
        total = total or self.steps * self.epochs
        rising = max(1, int(self.warm_up * total))
        if step < rising:
            return self.rate * (step + 1) / rising
        return self.rate * 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, total - rising)))


def _rng(seed: int, epoch: int) -> np.random.Generator:
    return np.random.default_rng([seed, epoch])


@cache
def _set(name: str) -> data.DataSet:
    return getattr(data, name)()


def _mlp_batches(seed: int, epoch: int) -> Iterator[Batch]:
    return data.batches(_set("fashion").train, 128, _rng(seed, epoch))


def _resnet_batches(seed: int, epoch: int) -> Iterator[Batch]:
    rng = _rng(seed, epoch)
    for images, labels in data.batches(_set("cifar10").train, 128, rng):
        yield data.augmented(images, rng, shift=2), labels


def _lstm_batches(seed: int, epoch: int) -> Iterator[Batch]:
    return data.batches(_set("reviews").train, 32, _rng(seed, epoch))


@cache
def _stream() -> tuple[Array, Array]:
    return data.news_stream()


def _text_batches(seed: int, epoch: int) -> Iterator[Batch]:
    return data.windows(_stream()[0], 256, 16, _rng(seed, epoch))


def _text_test() -> Batch:
    rows = _stream()[1]
    count = (len(rows) - 1) // 256
    return (
        rows[: count * 256].reshape(count, 256),
        rows[1 : count * 256 + 1].reshape(count, 256),
    )


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "mlp", models.Mlp, _mlp_batches, 468, 8, "adamw", 1e-3, 1e-2,
            lambda: _set("fashion").test, warm_up=0.3,
        ),
        Recipe(
            "resnet20", models.ResNet20, _resnet_batches, 390, 13, "sgd", 0.2, 5e-4,
            lambda: _set("cifar10").test, warm_up=0.3,
        ),
        Recipe(
            "transformer", models.Transformer, _text_batches, 400, 1, "adamw", 1e-3, 1e-1,
            _text_test, metric="perplexity", clip=1.0,
        ),
        Recipe(
            "lstm", models.LstmClassifier, _lstm_batches, 1236, 1, "adamw", 1e-3, 1e-2,
            lambda: _set("reviews").test, warm_up=0.3, clip=1.0,
        ),
    )
}  # fmt: skip
