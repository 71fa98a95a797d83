"""Quantization points: values that products with constant weights read, grouped by sharing.

Products that read the same value form one point, because they share its quantized form. Products
that read the same weight (a network unrolled in time) do too: the weight is rounded once for the
rows of all its inputs, and these inputs share scale and factors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from bitwright.ir.arrays import Array
from bitwright.ir.dtype import f32
from bitwright.ir.graph import Graph, Node, Value, constant_value
from bitwright.ops.sequence.recurrent import GATES
from bitwright.quant.model.products import BatchedProduct, Product
from bitwright.quant.model.window_rows import has_window_rows

MIN_WEIGHTS_IN_LOOP = 1 << 16
"""Points in loop bodies with fewer weights stay float: overhead dominates their iterations."""
_OPS = ("matmul", "grouped_matmul", "conv", *GATES)


@dataclass(eq=False)
class QuantizationPoint:
    """Values and the products that read them; they share scale, factors and weights."""

    products: list[Product] = field(default_factory=list)
    sizes: Array | None = None
    """Channel magnitudes by the weights of the preceding product, if there is one."""
    is_shared: bool = False
    """Whether products of another point read the first value along another axis."""
    is_in_loop: bool = False

    @cached_property
    def values(self) -> list[Value]:
        return list(dict.fromkeys(product.x for product in self.products))

    @property
    def only_value(self) -> Value | None:
        """The value if there is only one, else None."""
        return self.values[0] if len(self.values) == 1 else None

    def readers(self, value: Value) -> list[Product]:
        return [product for product in self.products if product.x is value]

    @cached_property
    def distinct(self) -> list[Product]:
        """One product per weight."""
        return list({product.key: product for product in reversed(self.products)}.values())[::-1]

    @property
    def path(self) -> str:
        """The path of the body that contains it."""
        return self.products[0].path

    @property
    def name(self) -> str:
        """The path of its first value; unique among points."""
        tap = self.path + self.values[0].name
        return f"{tap} along axis {self.products[0].channel_axis}" if self.is_shared else tap

    @property
    def windows(self) -> dict[Any, Product]:
        """One product for each kind of rows, by `window_key`."""
        return {product.window_key: product for product in self.products}

    @property
    def weights(self) -> int:
        return sum(product.weight.size for product in self.distinct)

    @property
    def is_inside(self) -> bool:
        """Whether it is in the body of a branch or loop."""
        return bool(self.path)

    @cached_property
    def channels(self) -> int:
        """The number of channels, from the weights."""
        product = self.products[0]
        return product.groups * int(product.matrix.shape[2]) // product.window_size

    @property
    def is_rowwise(self) -> bool:
        return all(product.is_rowwise for product in self.products)

    @property
    def has_rows(self) -> bool:
        """Whether rows can have their own ranges, after im2col if necessary."""
        return all(p.is_rowwise or has_window_rows(p) for p in self.products)


def find_points(graph: Graph, path: str = "") -> list[QuantizationPoint]:
    """Quantization points in graph order, then those in branches and in loop bodies."""
    found = _joined(list(_products(graph, path)))
    for node in graph.nodes:
        for name, body in node.bodies.items():
            inside = find_points(body, f"{path}{node.name}/{name}/")
            for point in inside:
                point.is_in_loop |= node.op != "if"
            found += [s for s in inside if node.op == "if" or s.weights >= MIN_WEIGHTS_IN_LOOP]
    return found


def _joined(products: list[Product]) -> list[QuantizationPoint]:
    """Points of products that share a value and its channel axis, or a weight."""
    groups: dict[Hashable, list[Product]] = {}
    for product in products:
        keys = (product.x, product.channel_axis), product.key
        known = {id(groups[key]): groups[key] for key in keys if key in groups}
        first, *others = [*known.values()] or [[]]
        for other in others:
            first += other
            groups.update({key: first for key, group in groups.items() if group is other})
        first.append(product)
        groups.update(dict.fromkeys(keys, first))
    place = {product: number for number, product in enumerate(products)}
    distinct = {id(group): group for group in groups.values()}.values()
    points = [QuantizationPoint(sorted(group, key=lambda p: place[p])) for group in distinct]
    points.sort(key=lambda point: place[point.products[0]])
    counts = Counter(value for point in points for value in point.values)
    for point in points:
        point.is_shared = counts[point.values[0]] > 1
    return points


def _products(graph: Graph, path: str) -> Iterator[Product]:
    readers: dict[Value, list[Node]] = {}
    for node in graph.nodes:
        for value in node.operands:
            readers.setdefault(value, []).append(node)
    results = set(graph.results)
    for node in graph.nodes:
        if node.op not in _OPS or node.outputs[0].dtype != f32:
            continue
        x, (source, weight) = node.inputs[0], _weight(node.inputs[1])
        if weight is None or x is None or x.is_constant or x.rank < 2 or not weight.size:
            continue
        if node.op == "conv":
            bias = constant_value(node.inputs[2]) if len(node.inputs) > 2 else None
            if len(node.inputs) > 2 and node.inputs[2] is not None and bias is None:
                continue  # its bias is not constant
            if all(isinstance(size, int) for size in node.attrs.get("pads") or ()):
                yield Product(node, weight, bias, None, path, source)
        elif node.op in GATES:
            if constant_value(node.inputs[2]) is not None:
                matrix = weight.reshape(-1, weight.shape[-1]).T
                yield Product(node, matrix, None, None, path, source)
        elif node.op == "grouped_matmul":
            yield BatchedProduct(node, weight, None, None, path, source)
        elif weight.ndim == 2:
            add = _bias_add(node, readers, results)
            bias = None if add is None else _constant_operand(add)
            yield Product(node, weight, bias, add, path, source)
        elif weight.ndim > 2 and (own := _axes_in_x(x, weight)) is not None:
            yield BatchedProduct(node, weight, None, None, path, source, own)


def _axes_in_x(x: Value, weight: Array) -> tuple[int, ...] | None:
    """Batch axes of the weight that x also has; None if that is only known at run time."""
    found = []
    for axis in range(weight.ndim - 2):
        place = x.rank - weight.ndim + axis
        if weight.shape[axis] == 1 or place < 0 or x.shape[place] == 1:
            continue
        if x.shape[place] != weight.shape[axis]:
            return None
        found.append(axis)
    return tuple(found)


def _weight(value: Value | None) -> tuple[Value | None, Array | None]:
    """The constant of a weight, possibly behind a transpose, and the weight's array."""
    is_transposed = value is not None and value.node.op == "transpose"
    source = value.node.inputs[0] if value is not None and is_transposed else value
    array = constant_value(source)
    if array is None or value is None:
        return None, None
    return source, array.transpose(value.node.attrs["perm"]) if is_transposed else array


def _bias_add(node: Node, readers: dict[Value, list[Node]], results: set[Value]) -> Node | None:
    """The addition of a constant vector that is the only reader of a product."""
    result = node.outputs[0]
    found = readers.get(result, [])
    if len(found) != 1 or found[0].op != "add" or result in results:
        return None
    vector = _constant_operand(found[0])
    width = result.shape[-1]
    fits = vector is not None and vector.shape == (width,)
    return found[0] if fits and found[0].outputs[0].rank == result.rank else None


def _constant_operand(add: Node) -> Array | None:
    values = [constant_value(v) for v in add.operands]
    return next((v for v in values if v is not None), None)
