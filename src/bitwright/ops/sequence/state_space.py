"""Linear recurrences over a sequence: selective state spaces and the gated delta rule.

    selective_scan   h = exp(delta_t a) * h + (delta_t x_t) b_t'      y_t = h c_t + d * x_t
    gated_delta      S = exp(g_t) S;  S += k_t (beta_t (v_t - S' k_t))'      y_t = scale * S' q_t

Both return all outputs and the final state, so a sequence can be computed in parts.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.ir.graph import Value
from bitwright.ir.types import TensorType
from bitwright.ops.core import expect
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.gradients import number
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import Array, Attr, Kind, OpDef, Sample, draw, sample
from bitwright.ops.core.reverse import composed
from bitwright.ops.sequence.scan_form import Values, scan_over

Type = TensorType | None


def _infer_scan(
    x: TensorType,
    delta: TensorType,
    a: TensorType,
    b: TensorType,
    c: TensorType,
    d: Type,
    state: Type,
) -> tuple[TensorType, TensorType]:
    expect.floating("x", x)
    expect.same_dtype(x, delta, a, b, c, d, state)
    expect.rank("x", x, 3)
    expect.rank("a", a, 2)
    batch, steps, channels = x.shape
    size = a.shape[1]
    expect.shape("delta", delta, x.shape)
    expect.shape("a", a, (channels, size))
    expect.shape("b", b, (batch, steps, size))
    expect.shape("c", c, (batch, steps, size))
    if d is not None:
        expect.shape("d", d, (channels,))
    if state is not None:
        expect.shape("state", state, (batch, channels, size))
    return x, TensorType(x.dtype, (batch, channels, size))


def _selective_scan(
    x: Array, delta: Array, a: Array, b: Array, c: Array, d: Array | None, state: Array | None
) -> tuple[Array, Array]:
    x, delta, a, b, c = map(wide, (x, delta, a, b, c))
    batch, steps, channels = x.shape
    h = np.zeros((batch, channels, a.shape[1])) if state is None else wide(state)
    y = np.zeros_like(x)
    for t in range(steps):
        step = delta[:, t, :, None]
        h = np.exp(step * a) * h + step * x[:, t, :, None] * b[:, t, None, :]
        y[:, t] = np.einsum("bdn,bn->bd", h, c[:, t])
    return y if d is None else y + wide(d) * x, h


def _infer_delta(
    q: TensorType,
    k: TensorType,
    v: TensorType,
    g: TensorType,
    beta: TensorType,
    state: Type,
    **_: Any,
) -> tuple[TensorType, TensorType]:
    expect.floating("q", q)
    expect.same_dtype(q, k, v, g, beta, state)
    expect.rank("q", q, 4)
    expect.rank("v", v, 4)
    batch, heads, steps, keys = q.shape
    values = v.shape[3]
    expect.shape("k", k, q.shape)
    expect.shape("v", v, (batch, heads, steps, values))
    expect.shape("g", g, (batch, heads, steps))
    expect.shape("beta", beta, (batch, heads, steps))
    if state is not None:
        expect.shape("state", state, (batch, heads, keys, values))
    return v, TensorType(q.dtype, (batch, heads, keys, values))


def _gated_delta(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array | None, scale: float | None
) -> tuple[Array, Array]:
    q, k, v, g, beta = map(wide, (q, k, v, g, beta))
    batch, heads, steps, keys = q.shape
    q = q * ((keys or 1) ** -0.5 if scale is None else scale)
    s = np.zeros((batch, heads, keys, v.shape[3])) if state is None else wide(state)
    y = np.zeros_like(v)
    for t in range(steps):
        s = np.exp(g[:, :, t, None, None]) * s
        recalled = np.einsum("bhkv,bhk->bhv", s, k[:, :, t])
        correction = beta[:, :, t, None] * (v[:, :, t] - recalled)
        s = s + k[:, :, t, :, None] * correction[:, :, None, :]
        y[:, :, t] = np.einsum("bhkv,bhk->bhv", s, q[:, :, t])
    return y, s


def _compose_scan(
    m: Builder,
    x: Value,
    delta: Value,
    a: Value,
    b: Value,
    c: Value,
    d: Value | None,
    state: Value | None,
) -> tuple[Any, ...]:
    batch, _, channels = x.shape
    size = a.shape[1]

    def step(inner: Builder, states: Values, elements: Values, captures: Values) -> Any:
        (h,), (x_t, delta_t, b_t, c_t) = states, elements
        wide_step = inner.reshape(delta_t, shape=(batch, channels, 1))
        given = inner.reshape(inner.mul(delta_t, x_t), shape=(batch, channels, 1))
        b_t, c_t = (inner.reshape(v, shape=(batch, 1, size)) for v in (b_t, c_t))
        decay = inner.exp(inner.mul(wide_step, captures[0]))
        h = inner.add(inner.mul(decay, h), inner.mul(given, b_t))
        return [h], [inner.reduce_sum(inner.mul(h, c_t), axes=(2,), keepdims=False)]

    if state is None:
        state = m.expand(number(m, 0.0, x), shape=(batch, channels, size))
    rows = [m.transpose(v, perm=(1, 0, 2)) for v in (x, delta, b, c)]
    (last,), (y,) = scan_over(m, [state], rows, [a], step)
    y = m.transpose(y, perm=(1, 0, 2))
    return (y if d is None else m.add(y, m.mul(x, d))), last


def _compose_delta(
    b: Builder,
    q: Value,
    k: Value,
    v: Value,
    g: Value,
    beta: Value,
    state: Value | None,
    scale: float | None,
) -> tuple[Any, ...]:
    batch, heads, _, keys = q.shape
    values = v.shape[3]
    assert isinstance(keys, int)
    factor = (keys or 1) ** -0.5 if scale is None else scale

    def step(inner: Builder, states: Values, elements: Values, captures: Values) -> Any:
        (s,), (q_t, k_t, v_t, g_t, beta_t) = states, elements

        def read(row: Value) -> Any:
            """s' row, as [B, H, 1, V]."""
            return inner.matmul(inner.reshape(row, shape=(batch, heads, 1, keys)), s)

        s = inner.mul(inner.exp(inner.reshape(g_t, shape=(batch, heads, 1, 1))), s)
        target = inner.reshape(v_t, shape=(batch, heads, 1, values))
        rate = inner.reshape(beta_t, shape=(batch, heads, 1, 1))
        correction = inner.mul(rate, inner.sub(target, read(k_t)))
        s = inner.add(s, inner.mul(inner.reshape(k_t, shape=(batch, heads, keys, 1)), correction))
        return [s], [inner.reshape(read(q_t), shape=(batch, heads, values))]

    if state is None:
        state = b.expand(number(b, 0.0, q), shape=(batch, heads, keys, values))
    scaled = b.mul(q, number(b, factor, q))
    rows = [b.transpose(x, perm=(2, 0, 1, 3)) for x in (scaled, k, v)]
    rows += [b.transpose(x, perm=(2, 0, 1)) for x in (g, beta)]
    (last,), (y,) = scan_over(b, [state], rows, [], step)
    return b.transpose(y, perm=(1, 2, 0, 3)), last


def _scan_samples() -> list[Sample]:
    x, delta = draw(2, 5, 3), draw(2, 5, 3, seed=1, low=0.01, high=0.5)
    a = draw(3, 4, seed=2, low=-2, high=-0.1)
    b, c = draw(2, 5, 4, seed=3), draw(2, 5, 4, seed=4)
    empty = [part[:, :0] for part in (x, delta, b, c)]
    halves = [part.astype(np.float16) for part in (x, delta, a, b, c)]
    return [
        sample(x, delta, a, b, c),
        sample(x, delta, a, b, c, draw(3, seed=5), draw(2, 3, 4, seed=6)),
        sample(*empty[:2], a, *empty[2:], None, draw(2, 3, 4, seed=6)),
        sample(*halves, tolerance=1e-2),
    ]


def _delta_samples() -> list[Sample]:
    q, k = draw(2, 3, 5, 4, low=-0.5, high=0.5), draw(2, 3, 5, 4, seed=1, low=-0.5, high=0.5)
    v, state = draw(2, 3, 5, 6, seed=2), draw(2, 3, 4, 6, seed=3)
    g, beta = draw(2, 3, 5, seed=4, low=-1, high=0), draw(2, 3, 5, seed=5, low=0, high=1)
    return [
        sample(q, k, v, g, beta),
        sample(q, k, v, g, beta, state, scale=1.0),
        sample(*(part[:, :, :0] for part in (q, k, v, g, beta)), state),
    ]


OPDEFS = [
    OpDef(
        "selective_scan",
        Kind.REDUCTION,
        "x, delta, a, b, c, d?, state?",
        infer=_infer_scan,
        reference=_selective_scan,
        grad=composed(_compose_scan),
        samples=_scan_samples,
        doc="A selective state space over x[B, L, D] with step sizes delta, a[D, N], b and "
        "c[B, L, N], skip d[D]: the outputs and the final state[B, D, N].",
    ),
    OpDef(
        "gated_delta",
        Kind.REDUCTION,
        "q, k, v, g, beta, state?",
        infer=_infer_delta,
        reference=_gated_delta,
        grad=composed(_compose_delta),
        samples=_delta_samples,
        attrs={"scale": Attr("float", None)},
        doc="Linear attention by the gated delta rule: q and k[B, H, L, K], v[B, H, L, V], log "
        "decay g and rate beta[B, H, L]; scale None is 1/sqrt(K). Outputs and the final "
        "state[B, H, K, V].",
    ),
]
