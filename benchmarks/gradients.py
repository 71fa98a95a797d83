"""Gradients of whole models, checked along random directions.

    python benchmarks/gradients.py [--folder FOLDER] [resnet8 minilm mobilenetv2 ppocr stories15m]

The loss is a random projection of the outputs, the variables are all float weights. Per model: the
relative error of the f64 gradient against central differences of the f64 model along a direction,
and of the compiled f32 gradient against the f64 one (largest difference of a tensor, relative to
its largest element, worst tensor), and the interpreter fallbacks of the compiled program.

An element of relu that is zero up to the rounding of f32 has one slope in f32 and another in f64.
So a model with relu or clip has a third figure: the f32 error of the same model with softplus.
FOLDER holds <name>/model.onnx, as the project's yardstick prepares it.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
from models.draw import Draw
from models.widen import widened
from models.yardstick import YARDSTICK

import bitwright as bw
from bitwright.autodiff.grad import grad
from bitwright.ir import Graph, Value
from bitwright.ir.edit import replace_nodes
from bitwright.ir.graph import Node
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run
from bitwright.passes.manager import History, run_passes
from bitwright.pipeline import SIMPLIFY, compile_graph

Array = np.ndarray
Feeds = Mapping[str, Array]
MIN_WEIGHT = 8
"""Constants with fewer elements are parts of formulas."""
STEPS = (1e-5, 1e-6, 1e-7, 1e-8, 1e-9)
"""Long steps cross kinks of relu, short ones lose digits."""
ZERO = 1e-9
"""Gradients below this part of the largest are zero (biases of keys before a softmax)."""


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


def smoothed(graph: Graph) -> Graph:
    """The graph with softplus in place of relu and clip."""

    def change(node: Node) -> Node:
        has_kink = node.op in ("relu", "clip")
        return node.with_(op="softplus", inputs=node.inputs[:1], attrs={}) if has_kink else node

    return replace_nodes(graph, change)


def slope_along(loss: Callable[[float], float]) -> float:
    """The derivative by central differences: of all step lengths, where neighbours agree best."""
    slopes = [(loss(h) - loss(-h)) / (2 * h) for h in STEPS]
    pairs = list(pairwise(slopes))
    return sum(min(pairs, key=lambda pair: abs(pair[0] - pair[1]))) / 2


def compiled_error(graph: Graph, exact: dict[str, Array], feeds: Feeds) -> tuple[float, list[str]]:
    """The error of the worst tensor in f32, and the ops that the interpreter runs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exe = compile_graph(graph)
    found = exe.run(feeds)
    sizes = {n: float(np.abs(array).max()) for n, array in exact.items() if n.startswith("grad.")}
    largest = max(sizes.values())
    worst = max(
        float(np.abs(found[n] - exact[n]).max()) / (size if size > ZERO * largest else largest)
        for n, size in sizes.items()
    )
    return worst, sorted({step.op.op for step in exe.engine.fallbacks})  # type: ignore[attr-defined]


def check(name: str, path: Path) -> str:
    sizes, feed = YARDSTICK[name]
    feeds = feed(Draw(0), *sizes[0])
    simple = run_passes(bw.load(path), SIMPLIFY, History())
    graph, weights = projected(simple, feeds)
    graph, values = as_inputs(graph, set(weights))
    weights = connected(graph, weights)

    wide = widened(graph)
    wide_values = {n: a.astype(np.float64) for n, a in values.items()}
    wide_feeds = {n: a.astype(np.float64) if a.dtype == np.float32 else a for n, a in feeds.items()}
    everything = {**wide_feeds, **wide_values}
    exact = run(grad(wide, "loss", wrt=weights), everything)
    rng = np.random.default_rng(1)
    direction = {n: rng.normal(size=values[n].shape) * np.std(values[n]) for n in weights}

    def loss(step: float) -> float:
        moved = {n: wide_values[n] + step * direction[n] for n in weights}
        return float(run(wide, {**everything, **moved})["loss"])

    expected = slope_along(loss)
    found = sum(float((exact[f"grad.{n}"] * direction[n]).sum()) for n in weights)
    error = abs(found - expected) / max(abs(expected), 1e-30)
    worst, fallbacks = compiled_error(grad(graph, "loss", wrt=weights), exact, {**feeds, **values})
    errors = f"f64 {error:.1e}  f32 {worst:.1e}"
    if any(node.op in ("relu", "clip") for node in graph.nodes):
        backward = grad(smoothed(graph), "loss", wrt=weights)
        smooth, _ = compiled_error(
            backward, run(widened(backward), everything), {**feeds, **values}
        )
        errors += f"  f32 with softplus {smooth:.1e}"
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
