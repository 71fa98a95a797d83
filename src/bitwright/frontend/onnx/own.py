"""Functions that bitwright's exporter writes, taken for the ops they stand for.

A file may call anything by such a name, so what does not fit the op is inlined as any function is.
The function's body says the same as the op, by the exporter's tests.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from bitwright.errors import BitwrightError
from bitwright.frontend.onnx.context import Context, Inputs
from bitwright.frontend.onnx.node import OnnxNode
from bitwright.ir.dtype import DTYPES
from bitwright.ir.graph import Value

DOMAIN = "bitwright"
_WORDS = ("start", "end")
_ATTENTION: dict[str, type] = {
    "scale": float,
    "causal": bool,
    "causal_offset": str,
    "window": int,
    "window_right": int,
    "softcap": float,
    "in_codes": bool,
}
_ATTRS: dict[str, dict[str, type]] = {
    "attention": _ATTENTION,
    "dynamic_quantize": {"to": str, "per_token": bool},
    "dequantize": {"axis": int, "block": int, "to": str},
    "coded_matmul": {"block": int},
    "grouped_matmul": {},
}


def call(ctx: Context, node: OnnxNode, inputs: Inputs) -> Sequence[Value] | None:
    """The op's results, or None if this is no call that an op stands for."""
    op = re.sub(r"_\d+$", "", node.op_type)
    if node.domain != DOMAIN or op not in _ATTRS:
        return None
    attrs: dict[str, Any] = {}
    for name, kind in _ATTRS[op].items():
        value = node.attrs.get(name)
        if value is None:
            continue
        if (kind is str and value not in (*DTYPES, *_WORDS)) or (
            kind is not str and not isinstance(value, float if kind is float else int)
        ):
            return None
        attrs[name] = kind(value)
    try:
        if op == "coded_matmul":
            return [_coded_matmul(ctx, *inputs, **attrs)]
        results = ctx.b.op(op, *inputs, **attrs)
    except (BitwrightError, TypeError):
        return None
    return [results] if isinstance(results, Value) else list(results)


def _coded_matmul(
    ctx: Context,
    x: Value,
    w: Value,
    scale: Value,
    steps: Value,
    zero: Value,
    offset: Value | None = None,
    *,
    block: int,
) -> Value:
    """Rows and weight as the graph had them; rows that several products read are one value."""
    rows = ctx.frame.dequantized.get((x, scale, zero))
    if rows is None:
        rows = ctx.b.dequantize(x, scale, zero, axis=-1, block=block)
        ctx.frame.dequantized[x, scale, zero] = rows
    weight = ctx.b.dequantize(w, steps, offset, axis=1 if steps.rank else None)
    return ctx.b.matmul(rows, weight)  # type: ignore[no-any-return]
