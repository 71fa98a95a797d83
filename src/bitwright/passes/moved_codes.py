"""Codes instead of real numbers through ops that only move elements, or pick the largest.

    quantize(dequantize(q))                 ->  q, where both have the same parameters
    transpose(dequantize(q)), …             ->  dequantize(transpose(q)), …
    concat(dequantize(p), dequantize(q))    ->  dequantize(concat(p, q)), the same parameters again
    quantize(concat(x, y)), …               ->  concat(quantize(x), quantize(y)), …

The last brings the step to codes to where the numbers are made, which is then where they are
stored, and moves a quarter of the bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.ir.graph import Value, constant_value
from bitwright.passes.codes import coded, comes_from_product, parts_of
from bitwright.rewrite import Match, Rule

# Ops that only move the elements of their first operand, or pick the largest of them.
_MOVES = ("transpose", "reshape", "slice", "gather", "max_pool")
_QUANTIZED_BEFORE = ("transpose", "reshape", "concat", "max_pool")


def moving_rules() -> list[Rule]:
    return [
        Rule("codes-of-codes", _any("quantize"), _same_codes, _other_codes),
        Rule("concat-of-codes", _any("concat"), _join, _apart),
        *(Rule(f"{op}-of-codes".replace("_", "-"), _any(op), _move, _stay) for op in _MOVES),
        Rule("codes-before-moving", _any("quantize"), _quantize_before, _quantize_behind),
    ]


def _any(name: str) -> Any:
    return lambda op: getattr(op, name)(...)


def _other_codes(m: Match) -> str:
    x = m.root.inputs[0]
    assert x is not None
    if x.node.op != "dequantize":
        return f"{x} is not dequantized"
    if not _same_parameters(m.root, x.node):
        return "the scales differ"
    codes = parts_of(x.node)[0]
    return "" if codes.dtype == m.root.attrs["to"] else "the types of the codes differ"


def _same_parameters(a: Any, b: Any) -> bool:
    """Whether two nodes, each a quantize or a dequantize, have the same scales and zero points."""
    granularity = [(n.attrs.get("axis"), n.attrs.get("block")) for n in (a, b)]
    return granularity[0] == granularity[1] and all(map(_equal, parts_of(a)[1:], parts_of(b)[1:]))


def _equal(a: Value | None, b: Value | None) -> bool:
    """Whether two parameters are the same numbers; none is zero."""
    if a is None or b is None:
        one = a if b is None else b
        known = None if one is None else constant_value(one)
        return one is None or (known is not None and not known.any())
    x, y = constant_value(a), constant_value(b)
    return a is b or (x is not None and y is not None and bool(np.array_equal(x, y)))


def _same_codes(op: Any, m: Match) -> Any:
    return parts_of(parts_of(m.root)[0].node)[0]


def _stay(m: Match) -> str:
    x = m.root.inputs[0]
    assert x is not None
    found = coded(x)
    if isinstance(found, str):
        return found
    if found.codes.is_constant and m.root.op != "gather":
        return "a constant is moved when the program is made"
    return "" if len(m.root.outputs) == 1 else "it has several results"


def _move(op: Any, m: Match) -> Any:
    real = m.root.inputs[0].node  # type: ignore[union-attr]
    codes, *parameters = real.inputs
    return op.like(real, op.like(m.root, codes, *m.root.inputs[1:]), *parameters)


def _apart(m: Match) -> str:
    """Why operands stay real numbers while they are put behind each other."""
    first, *rest = m.root.operands
    for value in (first, *rest):
        if isinstance(found := coded(value), str):
            return found
    for value in rest:
        is_same = parts_of(value.node)[0].dtype == parts_of(first.node)[0].dtype
        if not (is_same and _same_parameters(value.node, first.node)):
            return f"{value} and {first} have different parameters"
    return ""


def _join(op: Any, m: Match) -> Any:
    nodes = [value.node for value in m.root.operands]
    joined = op.like(m.root, *(parts_of(node)[0] for node in nodes))
    return op.like(nodes[0], joined, *nodes[0].inputs[1:])


def _quantize_behind(m: Match) -> str:
    """Why values become codes behind the op that moves them."""
    x, scale, zero = parts_of(m.root)
    node = x.node
    if node.op not in _QUANTIZED_BEFORE:
        return f"{node.op} does more than to move elements"
    known = [v is None or constant_value(v) is not None for v in (scale, zero)]
    if m.root.attrs.get("axis") is not None or not all(known):
        return "it is not one known scale"
    if m.uses(x) != 1:
        return f"{x} is read elsewhere too"
    if node.op == "max_pool" and not (
        len(node.outputs) == 1 and comes_from_product(next(iter(node.operands)))
    ):
        return "fewer elements are left to be quantized behind it"
    return ""


def _quantize_before(op: Any, m: Match) -> Any:
    node = parts_of(m.root)[0].node
    operands = list(node.operands)
    if node.op != "concat":
        del operands[1:]
    codes = [op.like(m.root, value, *m.root.inputs[1:]) for value in operands]
    return op.like(node, *codes, *node.inputs[len(operands) :])
