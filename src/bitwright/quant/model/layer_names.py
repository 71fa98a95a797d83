"""Readable layer names for reports, and all names that recipe patterns may match.

    layers.0.mlp.down_proj     from its weight, layers.0.mlp.down_proj.weight
    layers.0.mlp.down_proj     or from the PyTorch module that it was exported from
    logits                     or the name of its result, unless generated (`getitem_3`)

A name that several layers share gets a number, `cell.weight_hh #2`. Names of values in the graph do
not change: they are unique, and comparisons of models use them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

from bitwright.errors import BitwrightError
from bitwright.ir.graph import Graph, Node
from bitwright.ir.naming import module_of, names_of, near_misses, weight_names
from bitwright.ops.core.opdef import Kind
from bitwright.ops.core.registry import all_ops, get
from bitwright.quant.model.recipe import Recipe, matches

_WEIGHT = re.compile(r"\.(weight|kernel|weights|w)$")
_GENERATED = re.compile(
    r"(onnx::\w+|val|getitem|node|const(ant)?|initializer|tensor|transpose|t|mm|addmm|bmm|baddbmm|"
    r"linear|conv\dd|convolution|embedding|einsum|_?\d+|[A-Z]\w*_output)([._]?\d+)*"
)
"""Names that exporters generate; names of ops count as generated too."""


class LayerNames:
    """The names of a graph's layers, by the path of their first result."""

    def __init__(self, graph: Graph) -> None:
        layers = dict(_layers(graph, ""))
        weights = {path: _first(weight_names(node)) for path, node in layers.items()}
        shared = Counter(weights.values())
        self._all = {path: (path, *names_of(node)) for path, node in layers.items()}
        self._readable: dict[str, str] = {}
        self.weights = weights
        """The name of each layer's weight in the model, or ""."""
        taken: Counter[str] = Counter()
        for path, node in layers.items():
            alone = weights[path] if shared[weights[path]] == 1 else ""
            prefix = path.removesuffix(node.name)
            name = prefix + _readable(node, alone, weights[path])
            taken[name] += 1
            self._readable[path] = name if taken[name] == 1 else f"{name} #{taken[name]}"
        for path, name in self._readable.items():
            self._all[path] = (*self._all[path], name)

    def readable(self, path: str) -> str:
        """The name of a layer in reports; the path if the layer is unknown."""
        return self._readable.get(path, path)

    def all(self, path: str) -> tuple[str, ...]:
        """All names of a layer that a pattern may match."""
        return self._all.get(path, (path,))

    def resolved(self, recipe: Recipe) -> Recipe:
        """The recipe with its patterns resolved; a pattern that matches no layer is an error."""
        sized = (*recipe.weight_bits_of, *recipe.block_of)
        self.require_matches((*recipe.ignore, *recipe.schemes, *sized), "the recipe")
        found = {path: recipe.scheme_by(names) for path, names in self._all.items()}
        asked = {path: scheme for path, scheme in found.items() if scheme is not None}
        widths = {path: recipe.width_by(names) for path, names in self._all.items() if sized}
        return replace(recipe, asked=asked, widths=widths)

    def require_matches(self, patterns: Iterable[str], what: str) -> None:
        """Raise for a pattern that matches no layer; the hint lists similar names."""
        every = list(dict.fromkeys(name for names in self._all.values() for name in names))
        for pattern in patterns:
            if not any(matches(pattern, name) for name in every):
                raise BitwrightError(
                    f"pattern {pattern!r} of {what} matches no layer",
                    expected="the name of a layer or of its weight, as the report shows them",
                    hint=near_misses(pattern, every) or _some(self._readable.values()),
                )


def _layers(graph: Graph, path: str) -> Iterator[tuple[str, Node]]:
    """The nodes that reports show: products, and lookups in constant tables."""
    for node in graph.nodes:
        is_lookup = node.op == "gather" and bool(weight_names(node))
        if is_lookup or (get(node.op).kind is Kind.COMPUTE and not node.is_boundary):
            yield path + node.name, node
        for name, body in node.bodies.items():
            yield from _layers(body, f"{path}{node.name}/{name}/")


def _readable(node: Node, alone: str, weight: str) -> str:
    """The first name of the node that is not generated."""
    if alone and _WEIGHT.search(alone):
        return _WEIGHT.sub("", alone)
    if module := module_of(node.loc):
        return module
    if not _is_generated(node.name):
        return node.name
    return _WEIGHT.sub("", weight) if weight and not _is_generated(weight) else node.name


def _is_generated(name: str) -> bool:
    stem = re.sub(r"([._]?\d+)+$", "", name)
    return bool(_GENERATED.fullmatch(name)) or stem in all_ops()


def _first(names: tuple[str, ...]) -> str:
    return names[0] if names else ""


def _some(names: Iterable[str]) -> str:
    found = list(names)
    return f"Layers are, for example, {', '.join(map(repr, found[:3]))}." if found else ""
