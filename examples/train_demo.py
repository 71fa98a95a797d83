"""Trains the demo model with bitwright and writes `bitwright/demo`: digits.onnx and digits.npz.

Needs scikit-learn (for its copy of the data) besides bitwright; takes about a minute on one core.
The same seed gives the same files, with any number of threads.

    python examples/train_demo.py                 # writes src/bitwright/demo
    python examples/train_demo.py --validate 5    # 5-fold accuracy inside the training part only
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

import bitwright as bw
from bitwright.ir import Graph, Value

SEED = 20
HELD_OUT, CALIBRATION = 600, 128
EPOCHS, BATCH, PEAK_RATE, WEIGHT_DECAY = 80, 64, 4e-3, 2e-2
FOLDER = Path(__file__).parent.parent / "src" / "bitwright" / "demo"
Array = np.ndarray


class Digits:
    """Builds the model: images [batch, 1, 8, 8] with values 0 to 1, to logits [batch, 10]."""

    def __init__(self) -> None:
        self.b, self.random = bw.Builder("digits"), np.random.default_rng(SEED)

    def graph(self) -> Graph:
        image = self.b.input("image", "f32[batch, 1, 8, 8]")
        x = self.residual(self.convolution(image, 16, "stem"), 16, "block1")
        x = self.b.max_pool(self.convolution(x, 32, "widen"), kernel_shape=(2, 2), strides=(2, 2))
        x = self.b.reduce_mean(self.residual(x, 32, "block2"), axes=(2, 3), keepdims=False)
        w = self.parameter("head.weight", (32, 10), 1 / math.sqrt(32))
        bias = self.parameter("head.bias", (10,), 1 / math.sqrt(32))
        return self.b.build(logits=self.b.add(self.b.matmul(x, w), bias))

    def parameter(self, name: str, shape: tuple[int, ...], reach: float) -> Value:
        start = self.random.uniform(-reach, reach, shape).astype(np.float32)
        return self.b.parameter(name, start)

    def convolution(self, x: Value, channels: int, name: str, add: Value | None = None) -> Value:
        """relu(batch_norm(conv(x)) + add)"""
        given = x.shape[1]
        w = self.parameter(f"{name}.weight", (channels, given, 3, 3), 1 / math.sqrt(given * 9))
        y = self.b.conv(x, w, pads=(1, 1, 1, 1))
        ones, zeros = np.ones(channels, np.float32), np.zeros(channels, np.float32)
        y = self.b.batch_norm(
            y,
            self.b.parameter(f"{name}.norm.scale", ones),
            self.b.parameter(f"{name}.norm.bias", zeros),
            self.b.parameter(f"{name}.norm.mean", zeros, trainable=False),
            self.b.parameter(f"{name}.norm.var", ones, trainable=False),
        )
        return self.b.relu(y if add is None else self.b.add(add, y))

    def residual(self, x: Value, channels: int, name: str) -> Value:
        y = self.convolution(x, channels, f"{name}.conv1")
        return self.convolution(y, channels, f"{name}.conv2", add=x)


def distorted(images: Array, random: np.random.Generator) -> Array:
    """Images with small random rotations, scales, shears and shifts; bilinear, zero outside."""
    count, _, height, width = images.shape

    def draw(spread: float) -> Array:
        return random.uniform(-spread, spread, (count, 1, 1))

    angle, size, shear = draw(math.radians(12)), 1 + draw(0.12), draw(0.15)
    cos, sin = np.cos(angle) * size, np.sin(angle) * size
    y, x = np.meshgrid(
        (2 * np.arange(height) + 1) / height - 1, (2 * np.arange(width) + 1) / width - 1,
        indexing="ij",
    )  # fmt: skip
    columns = ((cos * x + (shear - sin) * y + draw(0.15) + 1) * width - 1) / 2
    rows = ((sin * x + cos * y + draw(0.15) + 1) * height - 1) / 2
    padded = np.pad(images[:, 0], ((0, 0), (1, 1), (1, 1)))
    top, left = np.floor(rows).astype(int), np.floor(columns).astype(int)
    down, right = rows - top, columns - left
    index = np.arange(count)[:, None, None]

    def pixels(row: Array, column: Array) -> Array:
        return padded[index, np.clip(row + 1, 0, height + 1), np.clip(column + 1, 0, width + 1)]

    upper = pixels(top, left) * (1 - right) + pixels(top, left + 1) * right
    lower = pixels(top + 1, left) * (1 - right) + pixels(top + 1, left + 1) * right
    return (upper * (1 - down) + lower * down).astype(np.float32)[:, None]
