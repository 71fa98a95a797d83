"""Queries about the nodes that a value comes from."""

from __future__ import annotations

from collections.abc import Callable

from bitwright.ir.graph import Node, Value
from bitwright.ops.core.opdef import Kind
from bitwright.ops.core.registry import get


def comes_from(value: Value, accepts: Callable[[Node], bool]) -> bool:
    """Whether elementwise ops of one shape compute the value from the result of such a node."""
    seen, left = {value}, [value]
    while left:
        node = left.pop().node
        if accepts(node):
            return True
        if node.is_boundary or get(node.op).kind is not Kind.ELEMENTWISE:
            continue
        made = [v for v in node.operands if v.shape == node.outputs[0].shape and v not in seen]
        seen.update(made)
        left += made
    return False
