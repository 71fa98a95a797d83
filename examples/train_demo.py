"""Trains the demo model with bitwright and writes `bitwright/demo`: digits.onnx and digits.npz.

Needs scikit-learn (for its copy of the data) besides bitwright; about ten seconds on one core.
The same seed gives the same files, with any number of threads.

    python examples/train_demo.py                 # writes src/bitwright/demo
    python examples/train_demo.py --validate 5    # 5-fold accuracy inside the training part only
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

import bitwright as bw
from bitwright.ir import Graph, Value

SEED = 20
HELD_OUT, CALIBRATION = 600, 128
EPOCHS, BATCH, PEAK_RATE, WEIGHT_DECAY, SMOOTHING = 80, 64, 4e-3, 2e-2, 0.05
FOLDER = Path(__file__).parent.parent / "src" / "bitwright" / "demo"
Array = np.ndarray


class Digits:
    """Builds the model: images [batch, 1, 8, 8] with values 0 to 1, to logits [batch, 10]."""

    def __init__(self) -> None:
        self.b, self.random = bw.Builder("digits"), np.random.default_rng(SEED)

    def graph(self) -> Graph:
        image = self.b.input("image", "f32[batch, 1, 8, 8]")
        x = self.residual(self.convolution(image, 16, "stem"), 16, "block1")
        x = self.b.max_pool(self.convolution(x, 32, "widen"), kernel=(2, 2), strides=(2, 2))
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


def smoothed_cross_entropy(b: bw.Builder, outputs: Mapping[str, Value]) -> Value:
    """Cross entropy with a part of the probability spread over all classes."""
    logits = outputs["logits"]
    labels = b.input("labels", "i64[batch]")
    spread = b.neg(b.reduce_mean(b.log_softmax(logits), axes=(0, 1), keepdims=False))
    exact = b.cross_entropy(logits, labels)
    return b.add(b.mul(exact, 1 - SMOOTHING), b.mul(spread, SMOOTHING))


def train(images: Array, labels: Array) -> Graph:
    """The trained model in evaluation form."""
    steps = len(images) // BATCH

    def batches() -> Iterator[dict[str, Array]]:
        random = np.random.default_rng(SEED)
        for _ in range(EPOCHS):
            order = random.permutation(len(images))
            for chosen in order[: steps * BATCH].reshape(steps, BATCH):
                yield {"image": distorted(images[chosen], random), "labels": labels[chosen]}

    rising = 3 * EPOCHS * steps // 10
    trainer = bw.Trainer(
        Digits().graph(),
        loss=smoothed_cross_entropy,
        optimizer=bw.AdamW(lr=PEAK_RATE, weight_decay=WEIGHT_DECAY),
        schedule=bw.train.warmup(rising).then(rising, bw.train.cosine(EPOCHS * steps - rising)),
        seed=SEED,
    )
    trainer.fit(batches(), epochs=1, progress=False)
    return trainer.model()


def correct(model: Graph, images: Array, labels: Array) -> int:
    """The number of images that the model classifies correctly."""
    logits = bw.compile(model).run({"image": images})["logits"]
    return int((logits.argmax(axis=1) == labels).sum())


def scaled(images: Array) -> Array:
    """Pixels 0 to 16 as model inputs: f32[n, 1, 8, 8], 0 to 1."""
    return (images[:, None] / np.float32(16)).astype(np.float32)


def validate(images: Array, labels: Array, folds: int) -> None:
    """Print the accuracy on each fold of a model trained on the others."""
    right = 0
    for fold in range(folds):
        left_out = np.arange(len(images)) % folds == fold
        model = train(scaled(images[~left_out]), labels[~left_out])
        found = correct(model, scaled(images[left_out]), labels[left_out])
        right += found
        print(f"fold {fold}: {found / left_out.sum():.4f}")
    print(f"all folds: {right / len(images):.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("--validate", type=int, metavar="FOLDS", help="cross-validate and stop")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder that receives the files")
    arguments = parser.parse_args()

    data = load_digits()
    order = np.random.default_rng(SEED).permutation(len(data.images))
    images = data.images[order].astype(np.uint8)
    labels = data.target[order].astype(np.int64)
    training = slice(HELD_OUT, None)
    if arguments.validate:
        validate(images[training], labels[training], arguments.validate)
        return

    model = train(scaled(images[training]), labels[training])
    model.save(arguments.out / "digits.onnx", opset=18)
    calibration = slice(HELD_OUT, HELD_OUT + CALIBRATION)
    np.savez_compressed(
        arguments.out / "digits.npz",
        held_out_images=images[:HELD_OUT],
        held_out_labels=labels[:HELD_OUT].astype(np.uint8),
        calibration_images=images[calibration],
        calibration_labels=labels[calibration].astype(np.uint8),
    )
    right = correct(model, scaled(images[:HELD_OUT]), labels[:HELD_OUT])
    print(f"held out: {right} of {HELD_OUT} correct, {right / HELD_OUT:.2%}")


if __name__ == "__main__":
    main()
