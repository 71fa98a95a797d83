"""Statistics of batch norm, estimated anew on data before batch norm is folded into convolutions.

The model runs with the statistics of each batch, as in training. Means and mean squares are
averaged over batches, weighted by their samples:

    mean = Σ n mean_b / Σ n        var = Σ n (var_b + mean_b²) / Σ n - mean²
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.errors import TrainingError
from bitwright.ir.arrays import Array
from bitwright.ir.edit import Replacement, prune, replace_nodes
from bitwright.ir.graph import Graph, Node
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.check import verify
from bitwright.pipeline import compile_graph
from bitwright.quant.data.batches import Batches
from bitwright.quant.model.quantized_inputs import builder_for


def reestimate_batch_norm(graph: Graph, data: Any, threads: int | None = None) -> Graph:
    """The graph with running means and variances of every batch norm taken from the data."""
    observed = _observed(graph)
    if not observed.outputs:
        return graph
    exe = compile_graph(observed, threads=threads)
    sums: dict[str, Array] = {}
    count = 0
    for batch in Batches(data, graph):
        size = max((a.shape[0] for a in batch.values() if a.ndim), default=1)
        found = exe.run({name: batch[name] for name in exe.input_names})
        for name, array in found.items():
            if name.endswith(".var"):
                mean = found[name.removesuffix(".var") + ".mean"].astype(np.float64)
                array = array.astype(np.float64) + mean**2
            sums[name] = sums.get(name, np.zeros(array.shape)) + size * array.astype(np.float64)
        count += size
    if not count:
        raise TrainingError("there is no data to estimate statistics of batch norm from")
    new: dict[str, Array] = {}
    for node in graph.nodes:
        if _has_statistics(node):
            mean = sums[f"{node.name}.mean"] / count
            var = np.maximum(sums[f"{node.name}.var"] / count - mean**2, 0)
            for value, array in zip(node.inputs[3:5], (mean, var), strict=True):
                assert value is not None
                new[value.name] = array.astype(value.dtype.numpy)

    def change(node: Node) -> Node:
        if node.is_boundary and node.name in new:
            return node.with_(attrs={**node.attrs, "value": new[node.name]})
        return node

    return verify(replace_nodes(graph, change, bodies=False))


def _has_statistics(node: Node) -> bool:
    """Whether a node is a batch norm whose mean and variance are stored in the graph."""
    if node.op != "batch_norm":
        return False
    return all(v is not None and v.node.is_boundary for v in node.inputs[3:5])


def _observed(graph: Graph) -> Graph:
    """The graph with batch statistics, which are its only outputs."""
    b: Builder = builder_for(graph)
    outputs = []

    def change(node: Node) -> Node | Replacement:
        if not _has_statistics(node):
            return node
        start = len(b.nodes)
        y, mean, var = b.batch_norm_train(*node.inputs[:3], eps=node.attrs["eps"])
        outputs.extend([(f"{node.name}.mean", mean), (f"{node.name}.var", var)])
        return Replacement(b.nodes[start:], (y,))

    changed = replace_nodes(graph, change, bodies=False)
    return prune(changed.with_(outputs=tuple(outputs), updates=()))
