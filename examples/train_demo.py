"""Trains the demo model and writes the files of `bitwright/demo`: digits.onnx and digits.npz.

Needs torch, onnx, onnxscript, onnxruntime and scikit-learn (for its copy of the data); takes about
a minute on one core. The same seed and package versions reproduce the same files.

    python examples/train_demo.py                 # writes src/bitwright/demo
    python examples/train_demo.py --validate 5    # 5-fold accuracy inside the training part only
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import onnxscript.optimizer
import torch
from onnx_ir.passes.common import ClearMetadataAndDocStringPass
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

SEED = 20
HELD_OUT, CALIBRATION = 600, 128
EPOCHS, BATCH, PEAK_RATE, WEIGHT_DECAY = 80, 64, 4e-3, 2e-2
FOLDER = Path(__file__).parent.parent / "src" / "bitwright" / "demo"


class Residual(nn.Module):
    """relu(x + bn(conv(relu(bn(conv(x))))))"""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(y)))


class Digits(nn.Module):
    """Images [batch, 1, 8, 8] with values 0 to 1, to logits [batch, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(16)
        self.block1 = Residual(16)
        self.widen = nn.Conv2d(16, 32, 3, padding=1, bias=False)
        self.widen_norm = nn.BatchNorm2d(32)
        self.block2 = Residual(32)
        self.head = nn.Linear(32, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.block1(F.relu(self.stem_norm(self.stem(image))))
        x = F.max_pool2d(F.relu(self.widen_norm(self.widen(x))), 2)
        return self.head(self.block2(x).mean((2, 3)))


def distort(images: Tensor, random: torch.Generator) -> Tensor:
    """Augments images with small random rotations, scales, shears and shifts."""

    def draw(spread: float) -> Tensor:
        return (torch.rand(len(images), generator=random) * 2 - 1) * spread

    angle, size, shear = draw(math.radians(12)), 1 + draw(0.12), draw(0.15)
    cos, sin = angle.cos() * size, angle.sin() * size
    rows = torch.stack([cos, shear - sin, draw(0.15), sin, cos, draw(0.15)], dim=1)
    grid = F.affine_grid(rows.view(-1, 2, 3), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)


def train(images: Tensor, labels: Tensor) -> Digits:
    torch.manual_seed(SEED)
    random = torch.Generator().manual_seed(SEED)
    model = Digits()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=WEIGHT_DECAY)
    steps = EPOCHS * (len(images) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_RATE, total_steps=steps)
    model.train()
    for _ in range(EPOCHS):
        order = torch.randperm(len(images), generator=random)
        for start in range(0, len(images) // BATCH * BATCH, BATCH):
            chosen = order[start : start + BATCH]
            logits = model(distort(images[chosen], random))
            loss = F.cross_entropy(logits, labels[chosen], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def scaled(images: np.ndarray) -> np.ndarray:
    """Pixels 0 to 16 as model inputs: f32[n, 1, 8, 8], 0 to 1."""
    return (images[:, None] / np.float32(16)).astype(np.float32)


def validate(images: np.ndarray, labels: np.ndarray, folds: int) -> None:
    right = 0
    for fold in range(folds):
        left_out = np.arange(len(images)) % folds == fold
        model = train(
            torch.from_numpy(scaled(images[~left_out])), torch.from_numpy(labels[~left_out])
        )
        with torch.no_grad():
            found = model(torch.from_numpy(scaled(images[left_out]))).argmax(1).numpy()
        right += int((found == labels[left_out]).sum())
        print(f"fold {fold}: {(found == labels[left_out]).mean():.4f}")
    print(f"all folds: {right / len(images):.4f}")


def export(model: Digits, path: Path) -> None:
    """Writes one self-contained file without the exporter's metadata about local paths."""
    batch = torch.export.Dim("batch", min=1)
    program = torch.onnx.export(
        model,
        (torch.zeros(2, 1, 8, 8),),
        dynamo=True,
        opset_version=18,
        input_names=["image"],
        output_names=["logits"],
        dynamic_shapes=({0: batch},),
        optimize=False,  # would fold batch norm, which the compiler is to do
        verbose=False,
    )
    onnxscript.optimizer.fold_constants(program.model)
    onnxscript.optimizer.remove_unused_nodes(program.model)
    ClearMetadataAndDocStringPass()(program.model)
    proto = program.model_proto
    proto.graph.name = "digits"
    onnx.checker.check_model(proto, full_check=True)
    path.write_bytes(proto.SerializeToString(deterministic=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("--validate", type=int, metavar="FOLDS", help="cross-validate and stop")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder that receives the files")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # more threads change the order of sums, and the weights
    torch.use_deterministic_algorithms(True)

    data = load_digits()
    order = np.random.default_rng(SEED).permutation(len(data.images))
    images = data.images[order].astype(np.uint8)
    labels = data.target[order].astype(np.int64)
    training = slice(HELD_OUT, None)
    if arguments.validate:
        validate(images[training], labels[training], arguments.validate)
        return

    model = train(torch.from_numpy(scaled(images[training])), torch.from_numpy(labels[training]))
    export(model, arguments.out / "digits.onnx")
    calibration = slice(HELD_OUT, HELD_OUT + CALIBRATION)
    np.savez_compressed(
        arguments.out / "digits.npz",
        held_out_images=images[:HELD_OUT],
        held_out_labels=labels[:HELD_OUT].astype(np.uint8),
        calibration_images=images[calibration],
        calibration_labels=labels[calibration].astype(np.uint8),
    )
    session = onnxruntime.InferenceSession(arguments.out / "digits.onnx")
    (logits,) = session.run(None, {"image": scaled(images[:HELD_OUT])})
    right = int((logits.argmax(1) == labels[:HELD_OUT]).sum())
    print(f"held out: {right} of {HELD_OUT} correct, {right / HELD_OUT:.2%}")


if __name__ == "__main__":
    main()
