"""Quantized u8 values that products read are stored as i8, for targets whose products are signed.

    integer_matmul(requantize(x, z){u8}, w, z)   ->  integer_matmul(requantize(x, z - 128){i8}, w,
                                                     z - 128)
    dynamic_quantize(x){to=u8}                   ->  dynamic_quantize(x){to=u8, stored=i8}

Values and zero points move by 128 alike, so that every sum has the same bits. Reshapes, transposes,
slices, concatenations and maxima in between take the moved values. Other readers get
`cast(q) + 128`, where casts to f32 stay one.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from bitwright.ir.dtype import DType, f32, i8, i32, u8
from bitwright.ir.edit import map_bodies, prune, rebuild, replace_inputs
from bitwright.ir.graph import Graph, Node, Value, constant_value
from bitwright.ops.core.builder import Builder
from bitwright.rewrite.trace import Trace

RULE = "store-signed"
MOVES = frozenset({"reshape", "transpose", "slice", "split", "concat", "expand", "max_pool"})
"""Ops that give a moved result for moved operands."""
PRODUCTS = frozenset({"integer_matmul", "integer_conv"})
SHIFT = 128


def store_signed(graph: Graph, trace: Trace) -> Graph:
    graph = map_bodies(graph, lambda body: store_signed(body, trace))
    moved = _moved(graph)
    return _Edit(graph, moved, trace).run() if moved else graph


def _moved(graph: Graph) -> set[Value]:
    """The values to move: what products read, as far back as all makers can move."""
    found: set[Value] = set()
    for node in graph.nodes:
        if node.op not in PRODUCTS:
            continue
        x = node.inputs[0]
        if x is not None and x.dtype == u8 and _has_movable_zero(node) and _can_move(x):
            left = deque([x])
            while left:
                value = left.popleft()
                if value not in found:
                    found.update(v for v in value.node.outputs if v.dtype == u8)
                    if value.node.op in MOVES:
                        left.extend(v for v in value.node.operands if v.dtype == u8)
    return found


def _has_movable_zero(node: Node) -> bool:
    """Whether the zero point of a product's x is a constant, or that of a dynamic quantization."""
    zero = (*node.inputs, None, None)[2]
    if zero is None or constant_value(zero) is not None:
        return True
    return zero.node.op == "dynamic_quantize" and zero.index == 2


def _can_move(value: Value) -> bool:
    node = value.node
    if node.op == "dynamic_quantize":
        return value.index == 0 and bool(node.attrs.get("per_token"))
    if node.op == "requantize":
        zero = (*node.inputs, None, None)[1]
        return zero is None or constant_value(zero) is not None
    if node.op not in MOVES:
        return False
    return all(_can_move(v) for v in node.operands if v.dtype == u8)


class _Edit:
    def __init__(self, graph: Graph, moved: set[Value], trace: Trace) -> None:
        self.graph, self.moved, self.trace = graph, moved, trace
        self.b = Builder(graph.name)
        for node in graph.nodes:
            for name in node.names:
                self.b.fresh_name(name)
        self.replaced: dict[Value, Value] = {}
        self.signed: dict[Value, Value] = {}
        """Moved values by the values that they replace."""
        self.nodes: list[Node] = []

    def run(self) -> Graph:
        for node in self.graph.nodes:
            self._add(node)
        for value in self.graph.results:
            self._original(value)
        return prune(rebuild(self.graph, self.nodes, self.replaced))

    def _add(self, node: Node) -> None:
        if any(value in self.moved for value in node.outputs):
            self._move(node)
            return
        is_product = node.op in PRODUCTS and node.inputs[0] in self.moved
        if is_product and _has_movable_zero(node):
            new = self._product(node)
        elif self._is_widening(node):
            return self._widen(node)
        else:
            for value in node.operands:
                self._original(value)
            new = replace_inputs(node, self.replaced)
        self.nodes.append(new)
        if new is not node:
            self.replaced.update(zip(node.outputs, new.outputs, strict=True))

    def _move(self, node: Node) -> None:
        """The maker of moved values, as i8."""
        new = replace_inputs(node, self.replaced)
        attrs, inputs = dict(node.attrs), list(new.inputs)
        if node.op == "dynamic_quantize":
            attrs["stored"] = i8
        elif node.op == "requantize":
            attrs["to"] = i8
            inputs = [*inputs, None][: max(2, len(inputs))]
            inputs[1] = self._zero(node.inputs[1] if len(node.inputs) > 1 else None)
        else:
            inputs = [
                self.signed.get(old, new_value) if old is not None else None
                for old, new_value in zip(node.inputs, inputs, strict=True)
            ]
        types = tuple(t.with_dtype(i8) if t.dtype == u8 else t for t in node.types)  # type: ignore[union-attr]
        made = node.with_(inputs=tuple(inputs), attrs=attrs, types=types)
        self.trace.fired(RULE, node.name, [made.name])
        self.nodes.append(made)
        for old, new_value in zip(node.outputs, made.outputs, strict=True):
            if old.dtype == u8:
                self.signed[old] = new_value
            else:
                self.replaced[old] = new_value

    def _zero(self, value: Value | None) -> Value:
        known = np.zeros((), np.uint8) if value is None else constant_value(value)
        assert known is not None
        return self._built(self.b.constant((known.astype(np.int16) - SHIFT).astype(np.int8)))

    def _product(self, node: Node) -> Node:
        x, zero = node.inputs[0], (*node.inputs, None, None)[2]
        assert x is not None
        for value in node.operands:
            if value is not x and value is not zero:
                self._original(value)
        new = replace_inputs(node, self.replaced)
        inputs = [*new.inputs, None, None][: max(3, len(new.inputs))]
        inputs[0] = self.signed[x]
        inputs[2] = self.signed[zero] if zero in self.signed else self._zero(zero)
        return new.with_(inputs=tuple(inputs))

    def _is_widening(self, node: Node) -> bool:
        return node.op == "cast" and node.inputs[0] in self.moved and node.attrs["to"] in (f32, i32)

    def _widen(self, node: Node) -> None:
        """cast(q) as cast(q - 128) + 128, which is exact."""
        (x,) = node.operands
        to: DType = node.attrs["to"]
        wide = self._built(self.b.cast(self.signed[x], to=to))
        shift = self.b.constant(np.asarray(SHIFT, to.numpy))
        self.replaced[node.outputs[0]] = self._built(self.b.add(wide, shift))

    def _original(self, value: Value) -> None:
        """Makes the u8 value for a reader that needs it."""
        if value not in self.signed or value in self.replaced:
            return
        wide = self.b.cast(self.signed[value], to=i32)
        back = self.b.cast(self.b.add(wide, self.b.constant(np.int32(SHIFT))), to=u8)
        self.replaced[value] = self._built(back)

    def _built(self, value: Value) -> Value:
        """A value that the builder made; takes over the builder's nodes."""
        self.nodes += self.b.nodes
        self.b.nodes.clear()
        return value
