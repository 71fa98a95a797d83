"""A graph with chosen products and lookups in codes.

    static    y = (x / f coded in u8) . (w f coded in i8) + bias in i32
    dynamic   y = (x / f coded row by row) . (w f coded) + bias
              of a conv with a 1x1 window too: as a matrix product over the channels, moved last
    dynamic-tensor   the same with one range for all of x
    weights   y = x . (w coded) + bias
    recurrent W like any weight; R in i8 with a scale for each unit, and states coded when they run
    lookup    y = cast(codes[i]) * scale[i], one scale for each row of the table

Results keep their names, so that a quantized model can be compared value by value; those that
equalization made larger or smaller get others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from bitwright.ir.dtype import f8e8m0, f32
from bitwright.ir.graph import Graph, Node, Value, constant_value
from bitwright.ops.builder import Builder
from bitwright.ops.check import verify
from bitwright.quant.algorithms.choosing import Coding
from bitwright.quant.algorithms.codes import weight_codes, weight_scales
from bitwright.quant.algorithms.weights import Weights
from bitwright.quant.assign import Choice
from bitwright.quant.equalize import Folded, fold_factors
from bitwright.quant.products import Product
from bitwright.quant.scales import ScaleFormat
from bitwright.rewrite.rebuild import prune

Array = np.ndarray[Any, Any]
LARGEST_BIAS = 2**30


def apply_choices(
    graph: Graph,
    choices: list[Choice],
    weights: Mapping[str, Weights],
    lookups: list[Node],
    *,
    equalize: bool = True,
) -> Graph:
    """The graph in Q/DQ form; `weights` by name of the product.

    With `equalize`, factors go into the product before where they can (`quant.equalize`).
    """
    folded = Folded(choices, dict(weights), {}, {})
    if equalize:
        folded = fold_factors(graph, choices, weights)
    return verify(_Rewrite(graph, folded, lookups).run())


def static_codes(b: Builder, x: Value, coding: Coding, axis: int, alone: bool = False) -> Value:
    """x / f in codes of one range, dequantized; f has one factor for each channel on `axis`."""
    range_ = coding.range
    assert range_ is not None
    scale, zero = np.float32(range_.scale), np.uint8(range_.zero_point)
    stem = f"{x.name}.codes"
    codes = b.quantize(_smoothed(b, x, coding, axis, alone), scale, zero, to="u8", name=stem)
    return b.dequantize(codes, scale, zero)  # type: ignore[no-any-return]


def _dynamic_codes(b: Builder, x: Value, coding: Coding, axis: int, alone: bool) -> Value:
    """x / f in codes of a range that the run finds, for each row or for the tensor; dequantized."""
    per_token = coding.scheme == "dynamic"
    codes, scale, zero = b.dynamic_quantize(
        _smoothed(b, x, coding, axis, alone), to="u8", per_token=per_token
    )
    rows = {"axis": -1, "block": int(x.shape[-1])} if per_token else {}
    return b.dequantize(codes, scale, zero, **rows)  # type: ignore[no-any-return]


def _smoothed(b: Builder, x: Value, coding: Coding, axis: int, alone: bool) -> Value:
    """x / f, with one factor for each channel on `axis`.

    What is read for this `alone` takes the division in: a relu comes after it, relu(v / f), so that
    it joins the scales of the product before (OpenVINO 2026.4 is wrong on the other order); of
    v a + c, and of a norm with a scale, it goes into the constants.
    """
    if coding.factors is None:
        return x
    shape = [-1 if i == axis else 1 for i in range(x.rank)]
    inverse = coding.inverse.astype(np.float32)
    is_uniform = inverse.size > 0 and (inverse == inverse[0]).all()
    inverse = inverse[0] if is_uniform else inverse.reshape(shape)
    if alone and x.node.op == "relu":
        return b.relu(b.mul(*x.node.operands, inverse))  # type: ignore[no-any-return]
    if alone and axis == x.rank - 1 and (known := _constants_of_norm(x.node)):
        scaled = [(a * coding.inverse).astype(np.float32) for a in known]
        return getattr(b, x.node.op)(x.node.inputs[0], *scaled, **x.node.attrs)  # type: ignore[no-any-return]
    if alone and (parts := _multiple_and_constant(x)):
        v, a, c = parts
        scaled = [(known * inverse.astype(np.float64)).astype(np.float32) for known in (a, c)]
        return b.add(b.mul(v, scaled[0]), scaled[1])  # type: ignore[no-any-return]
    return b.mul(x, inverse)  # type: ignore[no-any-return]


def _constants_of_norm(node: Node) -> list[Array]:
    """Scale, and bias if there is one, of a norm of f32 rows that has a number for each column."""
    if node.op not in ("layer_norm", "rms_norm") or node.outputs[0].dtype != f32:
        return []
    scale, *more = (*node.inputs[1:], None)
    given = [scale, *(value for value in more if value is not None)]
    known = [a for value in given if (a := constant_value(value)) is not None]
    fits = len(known) == len(given) and all(a.shape == node.outputs[0].shape[-1:] for a in known)
    return known if fits else []


def _multiple_and_constant(x: Value) -> tuple[Value, Array, Array] | None:
    """v, a and c of x = v a + c with constants that spread over v."""
    outer = _with_constant(x, "add")
    inner = None if outer is None else _with_constant(outer[0], "mul")
    return None if outer is None or inner is None else (*inner, outer[1])


def _with_constant(x: Value, op: str) -> tuple[Value, Array] | None:
    """The two operands of an f32 node, one as large as its result and one a constant."""
    if x.node.op != op or x.dtype != f32:
        return None
    for value, other in (x.node.inputs, x.node.inputs[::-1]):
        known = constant_value(other)
        if known is not None and value is not None and value.shape == x.shape:
            return value, known
    return None


class _Rewrite:
    def __init__(self, graph: Graph, folded: Folded, lookups: list[Node]) -> None:
        self.graph, self.folded, self.lookups = graph, folded, set(lookups)
        self.weights, self.names = folded.weights, folded.names
        self.products: dict[Node, tuple[Product, Choice]] = {}
        self.adds: dict[Node, tuple[Product, Choice]] = {}
        for choice in folded.choices:
            for product in choice.site.products:
                if product.name in self.weights:
                    self.products[product.node] = product, choice
                    if product.add is not None:
                        self.adds[product.add] = product, choice
        self.shifts = {
            node: shifted for node in graph.nodes if (shifted := self._shifted(node)) is not None
        }
        self.b = Builder()
        for node in graph.nodes:
            for name in node.names:
                self.b.fresh_name(name)
        self.b.reserve_symbols(s.name for s in graph.input_symbols)
        self.new: dict[Value, Value] = {}
        self.coded: dict[tuple[str, bool], Value] = {}

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
        """Branches and bodies of loops in codes."""
        inner = replace(self.folded, names={}, bounds={})
        return {
            name: _Rewrite(body, inner, [*self.lookups]).run() for name, body in node.bodies.items()
        }

    def _bounds(self, clip: Node) -> list[Value | None]:
        """The bounds of a clip whose input is a multiple of what it was."""
        known = [None if v is None else constant_value(v) for v in clip.inputs[1:]]
        share = self.folded.bounds[clip]
        return [None if a is None else self.b.constant((a * share).astype(a.dtype)) for a in known]

    def _named(self, node: Node, value: Value) -> None:
        """Let `value`, made last, carry the name of the result it stands for."""
        last = self.b.nodes[-1]
        assert last.outputs[0] is value
        renamed = last.with_(names=(self.names.get(node, node.name), *last.names[1:]))
        self.b.nodes[-1] = renamed
        self.new[node.outputs[0]] = renamed.outputs[0]

    # products

    def _product(self, node: Node) -> None:
        product, choice = self.products[node]
        made = self.weights[product.name]
        as_rows = choice.scheme == "dynamic" and product.is_conv
        x = self._input(product, choice, as_rows)
        w = self._weight(product, made, as_rows)
        if product.is_conv and not as_rows:
            bias = self._bias(product, choice, made)
            attrs = dict(node.attrs)
            self._named(node, self.b.conv(x, w, bias, **attrs))
            return
        y = self.b.matmul(x, w)
        if as_rows:
            y = self.b.add(y, self._bias(product, choice, made))
            last = y.rank - 1
            y = self.b.transpose(y, perm=(0, last, *range(1, last)))
        elif product.add is None and made.correction.any() and product not in self.shifts.values():
            y = self.b.add(y, self._bias(product, choice, made))
        self._named(node, y)

    def _recurrent(self, node: Node) -> None:
        """A layer in codes; the mean error of the input's share goes into its half of the bias."""
        product, choice = self.products[node]
        made, b = self.weights[product.name], self.b
        inputs = [None if v is None else self.new[v] for v in node.inputs]
        _, w, r, bias, *_ = (*node.inputs, None)
        assert w is not None and r is not None
        inputs[0] = self._input(product, choice, False)
        inputs[1] = b.reshape(self._recurrent_weight(product, made), shape=w.shape)
        array = constant_value(r)
        assert array is not None
        rows = array.reshape(-1, array.shape[-1])
        scales = weight_scales(rows)
        codes = weight_codes(rows, scales).astype(np.int8)
        stored = b.constant(codes, name=f"{node.name}.recurrent")
        inputs[2] = b.reshape(b.dequantize(stored, scales.reshape(-1), axis=0), shape=r.shape)
        if made.correction.any():
            half = made.correction.reshape(array.shape[:2])
            both = np.concatenate([half, np.zeros_like(half)], axis=1)
            known = np.zeros_like(both) if bias is None else constant_value(bias)
            added = both if known is None else both + known
            inputs[3:4] = [b.constant(added) if known is not None else b.add(inputs[3], added)]
        kept = b.append(node.with_(inputs=tuple(inputs)))
        self.new.update(zip(node.outputs, kept.outputs, strict=True))

    def _recurrent_weight(self, product: Product, made: Weights) -> Value:
        """W as [directions · gates · H, terms]."""
        if made.scales.ndim > 1:
            return self.b.transpose(self._weight(product, made, False), perm=(1, 0))  # type: ignore[no-any-return]
        codes = self.b.constant(np.ascontiguousarray(made.codes.T), name=f"{product.name}.weight")
        return self.b.dequantize(codes, made.scales, axis=0)  # type: ignore[no-any-return]

    def _input(self, product: Product, choice: Choice, as_rows: bool) -> Value:
        x = self.new[product.x]
        if choice.coding is None:
            return x
        key = choice.site.name, as_rows
        if key not in self.coded:
            source, axis = x, product.channel_axis
            if as_rows:
                source = self.b.transpose(x, perm=(0, *range(2, x.rank), 1))
                axis = x.rank - 1
            code = static_codes if choice.scheme == "static" else _dynamic_codes
            alone = self.graph.uses[product.x] == len(choice.site.products)
            self.coded[key] = code(self.b, source, choice.coding, axis, alone)
        return self.coded[key]

    def _weight(self, product: Product, made: Weights, as_rows: bool) -> Value:
        b, codes = self.b, made.codes
        scales = self._scales(made.scales, made.scale_format)
        axis = product.output_axis
        if as_rows:
            codes, axis = np.ascontiguousarray(codes.reshape(codes.shape[0], -1).T), 1
        name = f"{product.name}.weight"
        if not made.block:
            return b.dequantize(b.constant(codes, name=name), scales, axis=axis)  # type: ignore[no-any-return]
        return b.dequantize(  # type: ignore[no-any-return]
            b.constant(codes, name=name), scales, axis=made.block_axis, block=made.block
        )

    def _scales(self, scales: Array, form: ScaleFormat) -> Array | Value:
        """Scales as they are stored, under the one scale that they may have."""
        if form.element == f32:
            return scales
        codes = self.b.constant(form.codes(scales))
        if form.element == f8e8m0:
            return codes
        return self.b.dequantize(codes, np.float32(form.tensor_scale))  # type: ignore[no-any-return]

    def _bias(self, product: Product, choice: Choice, made: Weights) -> Value:
        total = made.correction.astype(np.float64)
        if product.bias is not None:
            total = total + product.bias.reshape(-1)
        if choice.scheme == "static" and choice.coding is not None and choice.coding.range:
            scale = (np.float64(choice.coding.range.scale) * made.scales).astype(np.float32)
            codes = np.rint(total / scale)
            if np.abs(codes).max(initial=0) < LARGEST_BIAS and (scale > 0).all():
                stored = self.b.constant(codes.astype(np.int32), name=f"{product.name}.bias")
                return self.b.dequantize(stored, scale, axis=0)  # type: ignore[no-any-return]
        return self.b.constant(total.astype(np.float32), name=f"{product.name}.bias")

    def _bias_add(self, node: Node) -> None:
        product, choice = self.adds[node]
        y = self.new[product.node.outputs[0]]
        self._named(node, self.b.add(y, self._bias(product, choice, self.weights[product.name])))

    def _shifted(self, add: Node) -> Product | None:
        """The product that alone this adds a constant to, one that is no vector (positions, say).

        Its mean error goes into that constant: two sums of constants would be made one by whoever
        runs the model, or not, and rounded otherwise.
        """
        split = None if add in self.adds else _with_constant(add.outputs[0], "add")
        if split is None or split[0].node not in self.products or self.graph.uses[split[0]] != 1:
            return None
        product, choice = self.products[split[0].node]
        fits = product.node.op == "matmul" and choice.scheme != "static"
        return product if fits and self.weights[product.name].correction.any() else None

    def _shift(self, add: Node) -> None:
        split = _with_constant(add.outputs[0], "add")
        assert split is not None
        y, known = split
        total = known.astype(np.float64) + self.weights[self.shifts[add].name].correction
        self._named(add, self.b.add(self.new[y], self.b.constant(total.astype(np.float32))))

    # lookups

    def _lookup(self, node: Node) -> None:
        b = self.b
        table, indices = node.inputs
        array = constant_value(table)
        assert array is not None and indices is not None
        scales = weight_scales(array)
        codes = weight_codes(array, scales).astype(np.int8)
        at = self.new[indices]
        found = b.gather(b.constant(codes, name=f"{node.name}.table"), at, axis=0)
        scale = b.gather(b.constant(scales, name=f"{node.name}.scales"), at, axis=0)
        self._named(node, b.mul(b.cast(found, to="f32"), scale))


def table_error(node: Node) -> float:
    """Mean squared error of a table in codes, relative to its mean square."""
    array = constant_value(node.inputs[0])
    assert array is not None
    scales = weight_scales(array)
    lost = weight_codes(array, scales)
    lost *= scales
    lost -= array
    return float(np.vdot(lost, lost) / max(float(np.vdot(array, array)), 1e-30))
