"""Models as cases of the suite: the demo model, and files that the user names.

The demo model is quantized with its calibration images. Other models run on random inputs and are
quantized with them, which says little about their accuracy on real data.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from bitwright import demo
from bitwright.frontend.load import load
from bitwright.ir.arrays import Array
from bitwright.ir.feeds import check_sizes
from bitwright.ir.graph import Graph
from bitwright.report.feeds import random_inputs
from bitwright.report.suite.cases import FLOATS, MODELS, Case

PRECISIONS = (*FLOATS, "int8")
BATCHES = 8


def demo_cases(quick: bool) -> list[Case]:
    """The demo model with one image and with 32."""

    def make(count: int) -> tuple[Graph, list[dict[str, Array]]]:
        return load(demo.model_path()), demo.calibration(count)[:BATCHES]

    sizes = (1,) if quick else (1, 32)
    name = {1: "demo, 1 image", 32: "demo, 32 images"}
    return [Case(MODELS, name[n], PRECISIONS, lambda n=n: make(n)) for n in sizes]  # type: ignore[misc]


def file_case(path: str | Path, sizes: Mapping[str, int]) -> Case:
    """A model file with random inputs; free sizes are `sizes` or 1."""
    graph = load(path)
    check_sizes(sizes, (s.name for s in graph.input_symbols), f"graph {graph.name!r}")

    def make() -> tuple[Graph, list[dict[str, Array]]]:
        return graph, [random_inputs(graph, sizes, seed) for seed in range(BATCHES)]

    return Case(MODELS, Path(path).name, PRECISIONS, make)
