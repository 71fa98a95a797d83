"""Batch normalization of training becomes sums over channels and elementwise ops.

    batch_norm_train      mean, var = channel_moments(x); y = (x - mean) · rate + bias
    batch_norm_backward   sum, dot = channel_sums(dy, x, mean);
                          dx = rate · dy + (x - mean) · a + c, with a and c of each channel

so that activations and sums around it are computed in the same pass over memory. rate is
scale / sqrt(var + eps).
"""

from __future__ import annotations

from typing import Any

from bitwright.ir.dtype import f32
from bitwright.ir.graph import Value
from bitwright.ops.nn.batch_norm import channel_count, divided
from bitwright.ops.nn.channels import as_channels
from bitwright.rewrite import Match, Rule


def _in(op: Any, x: Value, like: Value) -> Any:
    return x if x.dtype == like.dtype else op.cast(x, to=like.dtype)


def _wide(op: Any, x: Value) -> Any:
    return op.cast(x, to=f32) if x.dtype.bits < 32 else x


def _train(op: Any, m: Match) -> Any:
    x, scale, bias = m.root.operands
    wide = _wide(op, x)
    mean, var = op.channel_moments(x)
    rate = op.mul(_in(op, scale, wide), op.rsqrt(op.add(var, m.root.attrs["eps"])))
    y = op.mul(op.sub(wide, as_channels(op, mean, x)), as_channels(op, rate, x))
    y = op.add(y, as_channels(op, _in(op, bias, wide), x))
    return _in(op, y, x), _in(op, mean, scale), _in(op, var, scale)


def _backward(op: Any, m: Match) -> Any:
    dy, x, scale, mean, var = m.root.operands
    wide = _wide(op, x)
    mean, var = _in(op, mean, wide), _in(op, var, wide)
    rate = op.rsqrt(op.add(var, m.root.attrs["eps"]))
    total, dot = op.channel_sums(dy, x, mean)
    dscale, factor = op.mul(dot, rate), op.mul(_in(op, scale, wide), rate)
    count = channel_count(x)
    slope = op.neg(op.mul(op.mul(factor, rate), divided(op, dscale, count)))
    offset = op.neg(op.mul(factor, divided(op, total, count)))
    distance = op.sub(wide, as_channels(op, mean, x))
    dx = op.add(
        op.mul(_wide(op, dy), as_channels(op, factor, x)),
        op.add(op.mul(distance, as_channels(op, slope, x)), as_channels(op, offset, x)),
    )
    return _in(op, dx, x), _in(op, dscale, scale), _in(op, total, scale)


BATCH_NORM = [
    Rule("batch-norm-train-as-moments", lambda op: op.batch_norm_train(...), _train),
    Rule("batch-norm-backward-as-sums", lambda op: op.batch_norm_backward(...), _backward),
]
