"""Gradients of whole models, checked along random directions.

    python benchmarks/gradients.py [--folder FOLDER] [resnet8 minilm mobilenetv2 ppocr stories15m]

The loss is a random projection of the outputs, the variables are all float weights. Per model: the
relative error of the f64 gradient against central differences of the f64 model along a direction,
and of the compiled f32 gradient against the f64 one (largest difference of a tensor, relative to
its largest element, worst tensor), and the interpreter fallbacks of the compiled program.
FOLDER holds <name>/model.onnx, as the project's yardstick prepares it.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from models.draw import Draw
from models.widen import widened
from models.yardstick import YARDSTICK

import bitwright as bw
from bitwright.autodiff.grad import grad
from bitwright.ir import Graph, Value
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run
from bitwright.passes.manager import History, run_passes
from bitwright.pipeline import SIMPLIFY, compile_graph

Array = np.ndarray
MIN_WEIGHT = 8
"""Constants with fewer elements are parts of formulas."""


def projected(graph: Graph, feeds: Mapping[str, Array]) -> tuple[Graph, list[str]]:
    """The graph with a random projection of its float outputs as the loss, and its weights."""
    shapes = {name: y.shape for name, y in run(graph, feeds).items()}
    b, rng = Builder.of(graph), np.random.default_rng(0)
    b.outputs.clear()
    total: Value | None = None
    for name, y in graph.outputs:
        if not y.dtype.is_float:
            continue
        factors = rng.normal(size=shapes[name]).astype(y.dtype.numpy)
        part = b.reduce_sum(b.mul(y, factors), axes=tuple(range(y.rank)), keepdims=False)
        total = part if total is None else b.add(total, part)
    assert total is not None
    weights = [
        v.name
        for v in (*graph.parameters, *graph.constants)
        if v.dtype.is_float and v.node.attrs["value"].size >= MIN_WEIGHT
    ]
    return b.build(loss=total), weights


def as_inputs(graph: Graph, names: set[str]) -> tuple[Graph, dict[str, Array]]:
    """The graph with some weights as inputs, and their values."""
    values, moved, nodes = {}, {}, []
    for node in graph.nodes:
        again = node.with_(inputs=tuple(None if v is None else moved[v] for v in node.inputs))
        if node.is_boundary and node.name in names:
            values[node.name] = node.attrs["value"]
            again = node.with_(op="input", attrs={})
        moved.update(zip(node.outputs, again.outputs, strict=True))
        nodes.append(again)
    outputs = tuple((name, moved[value]) for name, value in graph.outputs)
    return graph.with_(nodes=tuple(nodes), outputs=outputs), values


def connected(graph: Graph, names: list[str]) -> list[str]:
    """The names on which the loss depends."""
    needed = {graph.outputs[0][1]}
    for node in reversed(graph.nodes):
        if any(value in needed for value in node.outputs):
            needed.update(node.operands)
    return [name for name in names if graph.values[name] in needed]


def check(name: str, path: Path) -> str:
    sizes, feed = YARDSTICK[name]
    feeds = feed(Draw(0), *sizes[0])
    simple = run_passes(bw.load(path), SIMPLIFY, History())
    graph, weights = projected(simple, feeds)
    graph, values = as_inputs(graph, set(weights))
    weights = connected(graph, weights)
    with_grad = grad(graph, "loss", wrt=weights)

    wide = widened(graph)
    wide_values = {n: a.astype(np.float64) for n, a in values.items()}
    wide_feeds = {n: a.astype(np.float64) if a.dtype == np.float32 else a for n, a in feeds.items()}
    exact = run(grad(wide, "loss", wrt=weights), {**wide_feeds, **wide_values})
    rng = np.random.default_rng(1)
    direction = {n: rng.normal(size=values[n].shape) * np.std(values[n]) for n in weights}

    def loss(step: float) -> float:
        moved = {n: wide_values[n] + step * direction[n] for n in weights}
        return float(run(wide, {**wide_feeds, **wide_values, **moved})["loss"])

    slopes = [(loss(h) - loss(-h)) / (2 * h) for h in (1e-5, 5e-6)]
    expected = (4 * slopes[1] - slopes[0]) / 3
    found = sum(float((exact[f"grad.{n}"] * direction[n]).sum()) for n in weights)
    error = abs(found - expected) / max(abs(expected), 1e-30)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exe = compile_graph(with_grad)
    narrow = exe.run({**feeds, **values})
    worst = max(
        float(np.abs(narrow[f"grad.{n}"] - exact[f"grad.{n}"]).max())
        / max(float(np.abs(exact[f"grad.{n}"]).max()), 1e-30)
        for n in weights
    )
    fallbacks = sorted({step.op.op for step in exe.engine.fallbacks})  # type: ignore[attr-defined]
    errors = f"f64 {error:.1e}  f32 {worst:.1e}"
    return f"{name:12} {len(weights):4} weights  {errors}  fallbacks {fallbacks}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Check gradients of whole models.")
    parser.add_argument("models", nargs="*", default=list(YARDSTICK))
    default = os.environ.get("YARDSTICK_CACHE", Path.home() / ".cache" / "bitwright-yardstick")
    parser.add_argument("--folder", type=Path, default=Path(default))
    arguments = parser.parse_args()
    for name in arguments.models:
        path = arguments.folder / name / "model.onnx"
        if not path.exists():
            sys.exit(f"{path} is missing: prepare it with the yardstick's tasks.py")
        print(check(name, path), flush=True)


if __name__ == "__main__":
    main()
