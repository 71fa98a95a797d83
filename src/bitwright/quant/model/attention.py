"""Which attentions multiply 8-bit codes (`ops.quant.int8_attention`), and why the others do not.

Each is tried in the float model (`quant.model.sensitivity`): all of them at once first, and where the outputs
lose too much by that, one by one; those that cost least are taken as long as their losses, which
add up, stay within what the recipe allows.
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

FEWEST = 32
"""Queries and keys from which on codes are faster, as measured: below, making them costs more."""
SCHEME = "dynamic"
"""What it is called in reports: codes of ranges that the run finds."""


class Attentions:
    """The attentions of a graph, and what is decided about them."""

    def __init__(self, graph: Graph, recipe: Recipe, bindings: Mapping[str, int]) -> None:
        self.reasons: dict[str, str] = {}
        """By name, of those that were looked at."""
        self.open: list[Node] = []
        self.chosen: frozenset[str] = frozenset()
        self._recipe = recipe
        for node in graph.nodes:
            if node.op != "attention":
                continue
            self.reasons[node.name] = reason = _refusal(node, recipe, bindings)
            if not reason:
                self.open.append(node)

    def choose(self, sensitivity: SensitivityAnalysis) -> None:
        if not self.open:
            return
        limit = self._recipe.attention_sqnr_db
        budget = 10 ** (-limit / 10)
        together = sensitivity.together(*self.open, little=budget / 4)
        if self._recipe.attention == "int8" or decibels(together) >= limit:
            self._take(self.open, f"{decibels(together):.1f} dB of the outputs with all attentions")
            return
        alone = {node: sensitivity.together(node) for node in self.open}
        taken = []
        for node in sorted(alone, key=lambda n: alone[n]):
            budget -= alone[node]
            kept = f"{decibels(alone[node]):.1f} dB of the outputs"
            self.reasons[node.name] = f"{kept} would be left, less than the recipe allows"
            if budget >= 0:
                taken.append(node)
                self.reasons[node.name] = kept
        self.chosen = frozenset(node.name for node in taken)

    def _take(self, nodes: Collection[Node], reason: str) -> None:
        self.chosen = frozenset(node.name for node in nodes)
        self.reasons |= dict.fromkeys(self.chosen, reason)

    def give_up(self) -> None:
        """Everything in float again."""
        why = "the outputs lost too much in all"
        self.reasons |= dict.fromkeys(self.chosen, why)
        self.chosen = frozenset()

    def apply(self, graph: Graph) -> Graph:
        """The graph with the chosen ones in codes."""

        def change(node: Node) -> Node:
            if node.name not in self.chosen:
                return node
            return node.with_(attrs={**node.attrs, "int8": True})

        return replace_nodes(graph, change, bodies=False) if self.chosen else graph


def _refusal(node: Node, recipe: Recipe, bindings: Mapping[str, int]) -> str:
    """Why an attention is not even tried in codes."""
    if recipe.attention == "float" or recipe.scheme_of(node.name) == "float":
        return "the recipe leaves it in float"
    if recipe.schemes_allowed == ("weights",):
        return "the recipe quantizes weights only"
    if recipe.attention == "auto" and "dynamic" not in recipe.schemes_allowed:
        return "its ranges are found as the model runs, which the recipe does not allow"
    q, k = node.inputs[:2]
    assert q is not None and k is not None
    if q.dtype != f32:
        return f"it is of {q.dtype}"
    if any(value is not None for value in node.inputs[4:]):
        return "keys of a cache are read once for few queries, which codes would not make faster"
    lengths = [value.shape[2] for value in (q, k)]
    symbols = {s.name for size in lengths if isinstance(size, Dim) for s in size.symbols}
    if not symbols <= bindings.keys():
        return "how many queries and keys there are depends on the data"
    if recipe.attention == "int8":
        return ""
    sizes = [evaluate(size, bindings) for size in lengths]
    if min(sizes) < FEWEST:
        return f"{sizes[0]} queries and {sizes[1]} keys are too few for codes to be faster"
    return ""
