"""Rewrites a graph: the chosen products and lookups become quantized (Q/DQ form).

    static               y = q_u8(x / f) . q_i8(w f) + bias in i32
    dynamic_per_token    y = q_u8(x / f, range per row) . q_i8(w f) + bias;
                         a conv becomes a matmul over its channels (moved last) or over its
                         windows (im2col)
    dynamic_per_tensor   the same with one range for all of x
    weight_only          y = x . q(w) + bias
    recurrent            W like any weight; R in i8 with a scale per unit, dynamic states
    lookup               y = cast(q[i]) * scale[i], one scale per row of the table; a table that is
                         also the weight of a product shares that product's values and scales

Results keep their names, so that a quantized model can be compared value by value. Values that
equalization scaled get new names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from bitwright.ir.edit import prune
from bitwright.ir.graph import Graph, Node, Value, constant_value
from bitwright.ops.core.check import verify
from bitwright.quant.model import quantized_inputs
from bitwright.quant.model.assign import Choice
from bitwright.quant.model.embeddings import Lookup
from bitwright.quant.model.products import Product
from bitwright.quant.model.stored_weights import StoredWeights
from bitwright.quant.model.transforms.equalize import Folded, fold_factors
from bitwright.quant.model.weights.weights import QuantizedWeights
from bitwright.quant.model.window_rows import window_rows


def apply_choices(
    graph: Graph,
    choices: list[Choice],
    weights: Mapping[str, QuantizedWeights],
    lookups: list[Lookup],
    *,
    equalize: bool = True,
) -> Graph:
    """The graph in Q/DQ form; `weights` by name of the product.

    `equalize` folds factors into the preceding products (`quant.model.transforms.equalize`).
    """
    folded = Folded(choices, dict(weights), {}, {})
    if equalize:
        tied = {one.product.name for one in lookups if one.product is not None}
        folded = fold_factors(graph, choices, weights, tied)
    return verify(_Rewrite(graph, folded, {one.node: one for one in lookups}).run())


class _Rewrite:
    def __init__(self, graph: Graph, folded: Folded, lookups: Mapping[Node, Lookup]) -> None:
        self.graph, self.folded, self.lookups = graph, folded, lookups
        self.weights, self.names = folded.weights, folded.names
        self.products: dict[Node, tuple[Product, Choice]] = {}
        self.adds: dict[Node, tuple[Product, Choice]] = {}
        for choice in folded.choices:
            for product in choice.point.products:
                if product.name in self.weights:
                    self.products[product.node] = product, choice
                    if product.add is not None:
                        self.adds[product.add] = product, choice
        self.shifts = {
            node: shifted for node in graph.nodes if (shifted := self._shifted(node)) is not None
        }
        self.b = quantized_inputs.builder_for(graph)
        self.new: dict[Value, Value] = {}
        self.quantized: dict[tuple[str, Value, Any], Value] = {}
        tables = [one.product.name for one in lookups.values() if one.product is not None]
        self.stored = StoredWeights(self.b, tables)

    def run(self) -> Graph:
        for node in self.graph.nodes:
            self.b.loc = node.loc
            if node in self.products and self.products[node][0].is_recurrent:
                self._recurrent(node)
            elif node in self.products:
                self._product(node)
            elif node in self.adds:
                self._bias_add(node)
            elif node in self.shifts:
                self._shift(node)
            elif node in self.lookups:
                self._lookup(node)
            else:
                inputs = tuple(None if v is None else self.new[v] for v in node.inputs)
                if node in self.folded.bounds:
                    inputs = inputs[0], *self._bounds(node)
                names = (self.names[node],) if node in self.names else node.names
                bodies = self._bodies(node)
                same = inputs == node.inputs and names == node.names and not bodies
                attrs = {**node.attrs, **bodies}
                changed = node if same else node.with_(inputs=inputs, names=names, attrs=attrs)
                kept = self.b.append(changed)
                self.new.update(zip(node.outputs, kept.outputs, strict=True))
        return prune(
            self.graph.with_(
                nodes=tuple(self.b.nodes),
                outputs=tuple((name, self.new[v]) for name, v in self.graph.outputs),
                updates=tuple((self.new[s], self.new[v]) for s, v in self.graph.updates),
            )
        )

    def _bodies(self, node: Node) -> dict[str, Graph]:
        inner = replace(self.folded, names={}, bounds={})
        return {
            name: _Rewrite(body, inner, self.lookups).run() for name, body in node.bodies.items()
        }

    def _bounds(self, clip: Node) -> list[Value | None]:
        """The bounds of a clip, scaled with its input."""
        known = [None if v is None else constant_value(v) for v in clip.inputs[1:]]
        share = self.folded.bounds[clip]
        return [None if a is None else self.b.constant((a * share).astype(a.dtype)) for a in known]

    def _named(self, node: Node, value: Value) -> None:
        """Give `value`, the last node's result, the name of the result it replaces."""
        last = self.b.nodes[-1]
        assert last.outputs[0] is value
        renamed = last.with_(names=(self.names.get(node, node.name), *last.names[1:]))
        self.b.nodes[-1] = renamed
        self.new[node.outputs[0]] = renamed.outputs[0]

    # products

    def _product(self, node: Node) -> None:
        product, choice = self.products[node]
        made, stored = self.weights[product.name], self.stored
        as_rows = choice.scheme == "dynamic_per_token" and product.is_conv
        x = self._input(product, choice, as_rows)
        w = stored.weight(product, made, as_rows)
        if product.is_conv and not as_rows:
            bias = stored.bias(product, choice.activation, made)
            self._named(node, self.b.conv(x, w, bias, **node.attrs))
            return
        others = [self.new[v] for v in node.inputs[2:] if v is not None]
        y = self.b.matmul(x, w) if as_rows else self.b.op(node.op, x, w, *others)
        if as_rows:
            y = self.b.add(y, stored.bias(product, choice.activation, made))
            last = y.rank - 1
            y = self.b.transpose(y, perm=(0, last, *range(1, last)))
        elif product.add is None and made.correction.any() and product not in self.shifts.values():
            y = self.b.add(y, stored.bias(product, choice.activation, made))
        self._named(node, y)

    def _recurrent(self, node: Node) -> None:
        """Quantize a recurrent layer; the bias correction goes into the input half of the bias."""
        product, choice = self.products[node]
        made, b = self.weights[product.name], self.b
        inputs = [None if v is None else self.new[v] for v in node.inputs]
        _, w, r, bias, *_ = (*node.inputs, None)
        assert w is not None and r is not None
        array = constant_value(r)
        assert array is not None
        inputs[0] = self._input(product, choice, False)
        inputs[1] = b.reshape(self.stored.input_weight(product, made), shape=w.shape)
        inputs[2] = self.stored.state_weight(product, array)
        if made.correction.any():
            half = made.correction.reshape(array.shape[:2])
            both = np.concatenate([half, np.zeros_like(half)], axis=1)
            known = np.zeros_like(both) if bias is None else constant_value(bias)
            added = both if known is None else both + known
            inputs[3:4] = [b.constant(added) if known is not None else b.add(inputs[3], added)]
        kept = b.append(node.with_(inputs=tuple(inputs)))
        self.new.update(zip(node.outputs, kept.outputs, strict=True))

    def _input(self, product: Product, choice: Choice, as_rows: bool) -> Value:
        x = self.new[product.x]
        if choice.activation is None:
            return x
        key = choice.point.name, product.x, product.window_key if as_rows else None
        if key not in self.quantized:
            source, axis = x, product.channel_axis
            if as_rows and product.is_rowwise:
                source = self.b.transpose(x, perm=(0, *range(2, x.rank), 1))
                axis = x.rank - 1
            alone = self.graph.uses[product.x] == len(choice.point.readers(product.x))
            given = self.b, source, choice.activation, axis, alone
            if choice.scheme == "static":
                self.quantized[key] = quantized_inputs.static_qvalues(*given)
            elif as_rows and not product.is_rowwise:
                im2col = lambda v: window_rows(self.b, v, product)
                self.quantized[key] = quantized_inputs.dynamic_qvalues(*given, im2col)
            else:
                self.quantized[key] = quantized_inputs.dynamic_qvalues(*given)
        return self.quantized[key]

    def _bias_add(self, node: Node) -> None:
        product, choice = self.adds[node]
        y = self.new[product.node.outputs[0]]
        bias = self.stored.bias(product, choice.activation, self.weights[product.name])
        self._named(node, self.b.add(y, bias))

    def _shifted(self, add: Node) -> Product | None:
        """The product to which this node adds a constant that is not a vector (e.g. positions).

        Its bias correction is added to that constant: runtimes may or may not merge two constant
        additions, which would round differently.
        """
        split = None if add in self.adds else quantized_inputs.with_constant(add.outputs[0], "add")
        if split is None or split[0].node not in self.products or self.graph.uses[split[0]] != 1:
            return None
        product, choice = self.products[split[0].node]
        fits = product.node.op == "matmul" and (choice.scheme != "static" or not product.is_plain)
        return product if fits and self.weights[product.name].correction.any() else None

    def _shift(self, add: Node) -> None:
        split = quantized_inputs.with_constant(add.outputs[0], "add")
        assert split is not None
        y, known = split
        product = self.shifts[add]
        moved = self.weights[product.name].correction
        if not product.is_plain:
            moved = product.as_weight(moved.reshape(*product.matrix.shape[:2], 1))
        total = known.astype(np.float64) + moved
        self._named(add, self.b.add(self.new[y], self.b.constant(total.astype(np.float32))))

    # lookups

    def _lookup(self, node: Node) -> None:
        indices = node.inputs[1]
        assert indices is not None
        product = self.lookups[node].product
        if product is None:
            self._named(node, self.stored.lookup(node, self.new[indices]))
        else:
            made, activation = self.weights[product.name], self.products[product.node][1].activation
            found = self.stored.tied_lookup(product, activation, made, self.new[indices])
            self._named(node, found)
