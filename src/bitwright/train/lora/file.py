"""`bw.save_lora` and `bw.load_lora`: adapters alone, by name, in a safetensors file.

    bw.save_lora(trainer, "adapters.safetensors")
    adapted = bw.load_lora(model, "adapters.safetensors")

The arrays are `<layer>.lora_a` and `<layer>.lora_b`; the metadata holds the scale of each layer.
Adapters trained on weight-only quantized layers fit the float model too. Those of layers with
quantized activations need not: `bw.quantize` may have scaled their channels.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from bitwright.errors import BitwrightError, TrainingError
from bitwright.frontend.parameters import load_parameters
from bitwright.frontend.safetensors import read_safetensors
from bitwright.ir.arrays import Array
from bitwright.ir.graph import Graph
from bitwright.ir.naming import near_misses
from bitwright.train.lora.adapters import (
    A,
    B,
    find_adapters,
    graph_of,
    is_adapted,
    require_adapters,
)
from bitwright.train.lora.add import frozen, layers_of, with_adapters
from bitwright.train.lora.layers import Layer
from bitwright.train.safetensors_file import read_metadata, write_safetensors

KIND = "bitwright lora"


def save_lora(model: Any, path: str | Path, *, which: str = "last") -> None:
    """Write the adapters of a graph or trainer (its "last", "best" or "ema" weights)."""
    adapters = require_adapters(graph_of(model, which), "save")
    arrays: dict[str, Array] = {}
    for adapter in adapters:
        arrays[adapter.layer + A], arrays[adapter.layer + B] = adapter.arrays
    scales = {adapter.layer: adapter.scale for adapter in adapters}
    write_safetensors(path, arrays, {"kind": KIND, "scales": json.dumps(scales)})


def load_lora(model: Any, path: str | Path) -> Graph:
    """The graph with the adapters of a file; a graph that has adapters gets their values.

    The other parameters are frozen, as by `bw.add_lora`.
    """
    arrays, scales = _read(Path(path))
    graph = graph_of(model)
    if is_adapted(graph):
        return _with_values(graph, arrays, scales, Path(path))
    layers = layers_of(model, graph)
    wanted = {}
    for name, scale in scales.items():
        layer = _layer(name, layers, Path(path))
        a, b = (np.array(arrays[name + end]) for end in (A, B))
        _require_shapes(layer, a, b)
        wanted[layer] = a, b, scale
    return with_adapters(frozen(graph), wanted)


def _read(path: Path) -> tuple[dict[str, Array], dict[str, float]]:
    """The arrays and the scale of each layer."""
    try:
        arrays, meta = read_safetensors(path), read_metadata(path)
    except (BitwrightError, OSError, ValueError) as error:
        raise TrainingError(f"adapters cannot be read: {error}") from None
    try:
        scales = {str(name): float(value) for name, value in json.loads(meta["scales"]).items()}
        is_whole = {name + end for name in scales for end in (A, B)} == arrays.keys()
    except (KeyError, ValueError, TypeError, AttributeError):
        is_whole = False
    if meta.get("kind") != KIND or not is_whole:
        raise TrainingError(f"{path.name} is no file of adapters", expected="one of bw.save_lora")
    return arrays, scales


def _layer(name: str, layers: list[Layer], path: Path) -> Layer:
    """The layer of a name; names of weights and results serve if they fit one layer only."""
    exact = [layer for layer in layers if layer.name == name]
    fits = exact or [layer for layer in layers if name in layer.names]
    if len(fits) != 1:
        every = [layer.name for layer in layers]
        raise TrainingError(
            f"{path.name} has an adapter for {name!r}, and the graph has "
            + ("several such layers" if fits else "no such layer"),
            hint=near_misses(name, every) or f"Layers are {', '.join(map(repr, every[:5]))}.",
        )
    return fits[0]


def _require_shapes(layer: Layer, a: Array, b: Array) -> None:
    rank = a.shape[0] if layer.is_conv else a.shape[-1]
    expected = layer.shapes(rank)
    if (a.shape, b.shape) != expected:
        raise TrainingError(
            f"the adapter does not fit layer {layer.name!r}",
            expected=" and ".join(str(list(shape)) for shape in expected),
            found=f"{list(a.shape)} and {list(b.shape)}",
        )


def _with_values(
    graph: Graph, arrays: dict[str, Array], scales: dict[str, float], path: Path
) -> Graph:
    """The graph with new values for adapters of the same layers, shapes and scales."""
    own = {adapter.layer: adapter.scale for adapter in find_adapters(graph)}
    for name in sorted({*own, *scales}):
        if own.get(name) != scales.get(name):
            raise TrainingError(
                f"the adapters of {path.name} and of graph {graph.name!r} differ at {name!r}",
                expected=f"scale {own[name]}" if name in own else "no adapter",
                found=f"scale {scales[name]}" if name in scales else "no adapter",
                hint="bw.remove_lora drops the adapters of the graph.",
            )
    return load_parameters(graph, {n: np.array(a) for n, a in arrays.items()}, strict=False)
