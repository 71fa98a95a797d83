"""Tables and pictures of training runs (`train_models.py`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

FIRST = 200
"""Steps whose losses are compared one by one."""
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
        for seed, ours in sides.get("bitwright", {}).items():
            for side in SIDES[1:]:
                theirs = sides.get(side, {}).get(seed)
                if theirs is not None:
                    distance = first_distance(ours["losses"], theirs["losses"])
                    lines.append(
                        f"{model:12} seed {seed}: first {FIRST} losses within "
                        f"{distance:.3%} of {side}"
                    )
    return "\n".join(lines)


def first_distance(ours: list[float], theirs: list[float]) -> float:
    a, b = np.array(ours[:FIRST]), np.array(theirs[:FIRST])
    size = min(len(a), len(b))
    return float(np.max(np.abs(a[:size] - b[:size]) / np.abs(b[:size])))


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
