"""Second moments of the inputs of a model's matrices, one layer after another.

    H = X' X / rows        of every matrix, X the rows that calibration text gives it

Only one layer's weights and moments are in memory. A layer's inputs come from the layers before
it as they were quantized, so that later layers are fitted to what they will get.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from bitwright.compiler import compile
from bitwright.frontend.language.config import ModelConfig
from bitwright.frontend.language.decoder import layer_graph
from bitwright.frontend.language.stored import StoredTensor
from bitwright.frontend.language.weights import dequantized

Array = np.ndarray[Any, Any]


def embedded(config: ModelConfig, table: StoredTensor, tokens: Array) -> Array:
    """The embeddings of tokens [windows, n] as f32."""
    found = dequantized(table.part(tokens))
    return np.asarray(found * np.float32(config.embedding_scale), np.float32)


class LayerRun:
    """Runs one layer of a model on windows x[windows, n, width]."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, StoredTensor],
        layer: int,
        context: int,
        threads: int | None,
    ) -> None:
        graph, self.inputs = layer_graph(config, tensors, layer, context)
        self.executable = compile(graph, threads=threads)

    def outputs(self, x: Array) -> Array:
        """The layer's results on every window."""
        return np.stack([self._run(window)["y"] for window in x])

    def moments(self, x: Array) -> dict[str, Array]:
        """H of each matrix; matrices with the same input share it."""
        sums: dict[str, Array] = {}
        rows = 0
        for window in x:
            found = self._run(window)
            rows += len(window)
            for name in set(self.inputs.values()):
                part = found[name].reshape(-1, found[name].shape[-1])
                sums[name] = sums.get(name, 0) + (part.T @ part).astype(np.float64)
        return {matrix: sums[name] / rows for matrix, name in self.inputs.items()}

    def _run(self, window: Array) -> dict[str, Any]:
        places = np.arange(len(window), dtype=np.int32)
        feeds = {"x": window, "slot": np.zeros(len(window), np.int32), "position": places}
        return self.executable.run(feeds)


def layer_tensors(tensors: Mapping[str, StoredTensor], layer: int) -> dict[str, StoredTensor]:
    prefix = f"blk.{layer}."
    return {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
