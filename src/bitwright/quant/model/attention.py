"""Chooses which attention ops run in int8 (`ops.quant.int8_attention`), and why others do not.

The float model with switches (`quant.model.sensitivity`) measures the error of all attention ops
in int8 together. If that exceeds the recipe's limit, each is measured alone, and those with the
least error are taken while the sum of their errors stays within the limit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from bitwright.ir.dim import Dim, evaluate
from bitwright.ir.dtype import f32
from bitwright.ir.edit import replace_nodes
from bitwright.ir.graph import Graph, Node
from bitwright.quant.model.recipe import Recipe
from bitwright.quant.model.sensitivity import SensitivityAnalysis
from bitwright.quant.model.weights.nearest import decibels

MIN_LENGTH = 32
"""Queries and keys from which on int8 is faster (measured); below, quantization costs more."""
SCHEME = "dynamic_per_token"
"""The scheme of int8 attention in reports."""


class Attentions:
    """The attention ops of a graph, and which of them run in int8."""

    def __init__(self, graph: Graph, recipe: Recipe, bindings: Mapping[str, int]) -> None:
        self.reasons: dict[str, str] = {}
        """By name of the node."""
        self.open: list[Node] = []
        self.chosen: frozenset[str] = frozenset()
        self._recipe = recipe
        for node in graph.nodes:
            if node.op != "attention":
                continue
            self.reasons[node.name] = reason = _why_not_int8(node, recipe, bindings)
            if not reason:
                self.open.append(node)

    def choose(self, sensitivity: SensitivityAnalysis) -> None:
        """Choose the attention ops that run in int8, by measured output error."""
        if not self.open:
            return
        limit = self._recipe.attention_sqnr_db
        budget = 10 ** (-limit / 10)
        together = sensitivity.output_error(*self.open, negligible=budget / 4)
        if self._recipe.attention == "int8" or decibels(together) >= limit:
            self._take(self.open, f"{decibels(together):.1f} dB of the outputs with all attentions")
            return
        alone = {node: sensitivity.output_error(node) for node in self.open}
        taken = []
        for node in sorted(alone, key=lambda n: alone[n]):
            budget -= alone[node]
            kept = f"{decibels(alone[node]):.1f} dB of the outputs"
            self.reasons[node.name] = f"{kept} in int8, less than the recipe requires"
            if budget >= 0:
                taken.append(node)
                self.reasons[node.name] = kept
        self.chosen = frozenset(node.name for node in taken)

    def choose_unmeasured(self) -> None:
        """Without data, run in int8 what the recipe asks for and nothing else."""
        if self._recipe.attention == "int8":
            self._take(self.open, "the recipe asks for it")
        else:
            unknown = "its error in int8 was not measured"
            self.reasons |= {node.name: unknown for node in self.open}

    def _take(self, nodes: Collection[Node], reason: str) -> None:
        self.chosen = frozenset(node.name for node in nodes)
        self.reasons |= dict.fromkeys(self.chosen, reason)

    def revert(self) -> None:
        """Return all attention ops to float."""
        why = "the outputs lost too much in total"
        self.reasons |= dict.fromkeys(self.chosen, why)
        self.chosen = frozenset()

    def apply(self, graph: Graph) -> Graph:

        def change(node: Node) -> Node:
            if node.name not in self.chosen:
                return node
            return node.with_(attrs={**node.attrs, "int8": True})

        return replace_nodes(graph, change, bodies=False) if self.chosen else graph


def _why_not_int8(node: Node, recipe: Recipe, bindings: Mapping[str, int]) -> str:
    """The reason why an attention op cannot run in int8, or ""."""
    if recipe.attention == "float" or recipe.scheme_of(node.name) == "float":
        return "the recipe leaves it in float"
    if recipe.schemes_allowed == ("weight_only",):
        return "the recipe quantizes weights only"
    if recipe.attention == "auto" and "dynamic_per_token" not in recipe.schemes_allowed:
        return "its ranges are dynamic, which the recipe does not allow"
    q, k = node.inputs[:2]
    assert q is not None and k is not None
    if q.dtype != f32:
        return f"its type is {q.dtype}"
    if any(value is not None for value in node.inputs[4:]):
        return "it reads a key-value cache for few queries, where int8 is not faster"
    lengths = [value.shape[2] for value in (q, k)]
    symbols = {s.name for size in lengths if isinstance(size, Dim) for s in size.symbols}
    if not symbols <= bindings.keys():
        return "the number of queries and keys depends on the data"
    if recipe.attention == "int8":
        return ""
    sizes = [evaluate(size, bindings) for size in lengths]
    if min(sizes) < MIN_LENGTH:
        return f"{sizes[0]} queries and {sizes[1]} keys are too few for int8 to be faster"
    return ""
