"""Trains the benchmark models from scratch, with bitwright and with PyTorch.

    python benchmarks/train_models.py resnet20 --side bitwright --seed 0 --out runs
    python benchmarks/train_models.py --table runs
    python benchmarks/train_models.py --plot runs --pictures docs/pictures

A run writes RUNS/MODEL-SIDE-SEED.json after each epoch: the loss of each step, the metric on the
test set after each epoch, and the time. The same seed gives both sides the same weights and the
same batches.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from training.recipes import RECIPES, Recipe
from training.report import plot, table
from training.sides import BitwrightSide, Side, make_side

EVALUATED = 500
"""Samples of one evaluation batch."""


def metric(recipe: Recipe, side: Side) -> float:
    """Accuracy in percent, or perplexity, on the test set."""
    x, labels = recipe.test()
    size = 20 if recipe.metric == "perplexity" else EVALUATED
    total, count = 0.0, 0
    for start in range(0, len(x), size):
        logits, wanted = side.predict(x[start : start + size]), labels[start : start + size]
        if recipe.metric == "accuracy":
            total += float((logits.argmax(-1) == wanted).sum())
        else:
            flat = torch.from_numpy(np.asarray(logits)).reshape(-1, logits.shape[-1])
            found = torch.from_numpy(wanted).reshape(-1)
            total += float(torch.nn.functional.cross_entropy(flat, found, reduction="sum"))
        count += wanted.size
    return 100 * total / count if recipe.metric == "accuracy" else float(np.exp(total / count))


def train(
    recipe: Recipe,
    name: str,
    seed: int,
    threads: int,
    out: Path,
    epochs: int | None,
    stop: int | None,
) -> None:
    side = make_side(name, recipe, threads, seed)
    side.start()
    epochs = epochs or recipe.epochs
    total = recipe.steps * epochs
    losses: list[float] = []
    scores: list[float] = []
    seconds = 0.0
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{recipe.name}-{name}-{seed}"
    for epoch in range(epochs):
        batches = recipe.batches(seed, epoch)
        for _ in range(recipe.steps):
            batch = next(batches)
            start = time.perf_counter()
            losses.append(side.step(batch, recipe.rate_at(len(losses), total)))
            seconds += time.perf_counter() - start
            if len(losses) == stop:
                break
        scores.append(metric(recipe, side))
        print(
            f"{recipe.name} {name} seed {seed} epoch {epoch + 1}/{epochs} "
            f"loss {np.mean(losses[-recipe.steps :]):.4f} {recipe.metric} {scores[-1]:.3f} "
            f"{seconds / len(losses) * 1e3:.1f} ms/step",
            flush=True,
        )
        found = {
            "model": recipe.name, "side": name, "seed": seed, "threads": threads, "epochs": epochs,
            "metric": recipe.metric, "losses": losses, "scores": scores, "seconds": seconds,
        }  # fmt: skip
        path.with_suffix(".json").write_text(json.dumps(found))
        if len(losses) == stop:
            break
    if isinstance(side, BitwrightSide):
        side.trainer.save(path.with_suffix(".onnx"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the benchmark models from scratch.")
    parser.add_argument("models", nargs="*", choices=[*RECIPES, []])
    parser.add_argument("--side", default="bitwright", choices=["bitwright", "eager", "compiled"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--epochs", type=int, help="instead of the recipe's")
    parser.add_argument("--stop", type=int, help="end after so many steps of the schedule")
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--table", type=Path, help="print the runs of this folder")
    parser.add_argument("--plot", type=Path, help="draw the runs of this folder")
    parser.add_argument("--pictures", type=Path, default=Path("docs/pictures"))
    given = parser.parse_args()
    for name in given.models:
        options = given.threads, given.out, given.epochs, given.stop
        train(RECIPES[name], given.side, given.seed, *options)
    if given.table:
        print(table(given.table))
    if given.plot:
        plot(given.plot, given.pictures)


if __name__ == "__main__":
    main()
