"""Pairs of quantize and dequantize around activations."""

from __future__ import annotations

import numpy as np

from bitwright.ir.graph import Node, constant_value


def is_same_pair(node: Node, pair: Node) -> bool:
    """Whether a dequantize undoes a quantize: the same constants and granularity."""
    granularity = [(n.attrs.get("axis"), n.attrs.get("block", 0)) for n in (node, pair)]
    arrays = [[constant_value(v) for v in (*n.inputs[1:], None)[:2]] for n in (node, pair)]
    first, second = (
        [np.zeros(()) if a is None else a.reshape(-1) for a in found] for found in arrays
    )
    is_known = all(
        found is not None or v is None
        for n, row in zip((node, pair), arrays, strict=True)
        for v, found in zip((*n.inputs[1:], None)[:2], row, strict=True)
    )
    same = all(a.size == z.size and (a == z).all() for a, z in zip(first, second, strict=True))
    return is_known and same and granularity[0] == granularity[1]
