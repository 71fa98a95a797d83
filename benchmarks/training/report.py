"""Tables and pictures of training runs (`train_models.py`)."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray
FIRST = 200
"""Steps whose losses are compared one by one."""
WINDOW = 20
"""Steps whose mean losses are compared."""
SIDES = ("bitwright", "eager", "compiled")


def _runs(folder: Path) -> dict[str, dict[str, dict[int, dict[str, Any]]]]:
    """Runs by model, side and seed."""
    found: dict[str, dict[str, dict[int, dict[str, Any]]]] = {}
    for path in sorted(folder.glob("*.json")):
        run = json.loads(path.read_text())
        found.setdefault(run["model"], {}).setdefault(run["side"], {})[run["seed"]] = run
    return found


def table(folder: Path) -> str:
    """Final metrics of all seeds, and the largest distance of the first losses to PyTorch's."""
    lines = []
    for model, sides in _runs(folder).items():
        for side in SIDES:
            if side not in sides:
                continue
            runs = sides[side]
            scores = [run["scores"][-1] for run in runs.values()]
            one = next(iter(runs.values()))
            text = ", ".join(f"{score:.2f}" for score in scores)
            lines.append(
                f"{model:12} {side:10} {one['metric']} {text} (mean {np.mean(scores):.2f}), "
                f"{one['epochs']} epochs, {one['threads']} threads"
            )
        for a, b in itertools.combinations(SIDES, 2):
            for seed in sorted(sides.get(a, {}).keys() & sides.get(b, {}).keys()):
                losses = [np.array(sides[side][seed]["losses"][:FIRST]) for side in (a, b)]
                lines.append(
                    f"{model:12} seed {seed}: first {FIRST} losses of {a} and {b} within "
                    f"{distance(*losses):.3%}, means of {WINDOW} within "
                    f"{distance(*map(_windows, losses)):.3%}"
                )
    return "\n".join(lines)


def distance(ours: Array, theirs: Array) -> float:
    """The largest relative difference of two sequences."""
    return float(np.max(np.abs(ours - theirs) / np.abs(theirs)))


def _windows(losses: Array) -> Array:
    return losses[: len(losses) // WINDOW * WINDOW].reshape(-1, WINDOW).mean(1)


def plot(folder: Path, pictures: Path) -> None:
    """One picture for each model: losses of both sides, and the metric by epoch."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pictures.mkdir(parents=True, exist_ok=True)
    pyplot.rcParams["svg.hashsalt"] = "bitwright"
    for model, sides in _runs(folder).items():
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
        for side, color in zip(SIDES, ("tab:blue", "tab:orange", "tab:green"), strict=True):
            for number, run in enumerate(sides.get(side, {}).values()):
                losses = np.array(run["losses"])
                width = max(1, len(losses) // 150)
                smooth = losses[: len(losses) // width * width].reshape(-1, width).mean(1)
                label = _label(side) if number == 0 else None
                left.plot(
                    (np.arange(len(smooth)) + 0.5) * width, smooth, color=color, lw=1, label=label
                )
                epochs = np.arange(1, len(run["scores"]) + 1)
                right.plot(epochs, run["scores"], color=color, lw=1, marker=".", label=label)
        left.set(xlabel="step", ylabel="loss", title=model)
        metric = next(iter(next(iter(sides.values())).values()))["metric"]
        right.set(xlabel="epoch", ylabel=f"test {metric}")
        left.legend(frameon=False)
        for axes in (left, right):
            axes.grid(alpha=0.3)
        figure.savefig(pictures / f"training-{model}.svg", metadata={"Date": None})
        pyplot.close(figure)


def _label(side: str) -> str:
    return side if side == "bitwright" else f"PyTorch {side}"
