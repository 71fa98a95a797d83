"""Steps that work on rows: products, attention, norms, softmax, reductions, recurrent layers."""

from __future__ import annotations

import numpy as np
from onnx_growing import F32, I64, Growing, Size, Value, broadcast, count

REDUCTIONS = (
    "ReduceSum",
    "ReduceMean",
    "ReduceMax",
    "ReduceMin",
    "ReduceL1",
    "ReduceL2",
    "ReduceSumSquare",
    "ReduceLogSumExp",
    "ReduceProd",
)


def matmul(g: Growing) -> None:
    """Against a constant matrix, or a batch of them, or a vector."""
    x = g.operand(ranks=(1, 2, 2, 3, 3, 4))
    depth = x.shape[-1]
    if isinstance(depth, str):
        return
    columns = g.size()
    front: list[int] = []
    if x.rank > 2 and g.chance(0.3):
        front = [1 if isinstance(s, str) or g.chance(0.4) else s for s in x.shape[:-2]]
    if g.chance(0.1):
        w = g.weight([depth], depth)
        g.make("MatMul", [x, w], x.shape[:-1])
        return
    w = g.weight([*front, depth, columns], depth)
    y = g.make("MatMul", [x, w], [*x.shape[:-1], columns])
    if g.chance(0.5):
        y = g.make("Add", [y, g.constant(g.array([columns]))], y.shape)
    if g.chance(0.4):
        g.make(g.pick("Relu", "Gelu", "Tanh", "Softplus"), [y], y.shape)


def product(g: Growing) -> None:
    """Two computed values, transposed if needed."""
    x, w = g.operand(ranks=(2, 3, 4)), g.operand(ranks=(2, 3, 4))
    if x.shape[-1] != w.shape[-2]:
        perm = [*range(w.rank - 2), w.rank - 1, w.rank - 2]
        w = g.move("Transpose", [w], [w.shape[axis] for axis in perm], perm=perm)
    if x.shape[-1] != w.shape[-2]:
        known = x.shape[-1]
        if isinstance(known, str):
            return
        w = g.enter([*w.shape[:-2], known, g.size()])
    front = broadcast(x.shape[:-2], w.shape[:-2])
    shape = None if front is None else (*front, x.shape[-2], w.shape[-1])
    if shape is None or count(shape) > 1 << 14:
        return
    depth = 4 if isinstance(x.shape[-1], str) else max(1, x.shape[-1])
    small = g.make("Mul", [x, g.constant(np.float32(1 / depth**0.5))], x.shape)
    g.make("MatMul", [small, w], shape)


def gemm(g: Growing) -> None:
    x = g.operand(ranks=(2,))
    rows, depth = x.shape
    trans_a = g.chance(0.3)
    if trans_a:
        rows, depth = depth, rows
    if isinstance(depth, str):
        return
    columns, trans_b = g.size(), g.chance(0.5)
    w = g.weight([columns, depth] if trans_b else [depth, columns], depth)
    known: list[Size] = [rows, columns]
    c = g.other(known) if g.chance(0.7) else None
    attrs = {"alpha": g.pick(1.0, 0.5), "beta": g.pick(1.0, 2.0)}
    g.make("Gemm", [x, w, c], known, transA=int(trans_a), transB=int(trans_b), **attrs)


def einsum(g: Growing) -> None:
    equation, left, right, result = g.pick(
        ("bij,bjk->bik", "bij", "bjk", "bik"),
        ("ij,jk->ik", "ij", "jk", "ik"),
        ("bhqd,bhkd->bhqk", "bhqd", "bhkd", "bhqk"),
        ("ij,ij->i", "ij", "ij", "i"),
        ("i,j->ij", "i", "j", "ij"),
        ("bij,kj->bik", "bij", "kj", "bik"),
        ("ijk->kji", "ijk", "", "kji"),
        ("ijk->ik", "ijk", "", "ik"),
        ("bnd,ndk->bnk", "bnd", "ndk", "bnk"),
    )
    sizes: dict[str, Size] = {letter: g.pick(1, 2, 3, 5, 8) for letter in sorted(set(left + right))}
    if g.is_symbolic and g.chance(0.5):
        sizes[left[0]] = "n"
    operands = [g.enter([sizes[letter] for letter in side]) for side in (left, right) if side]
    g.make("Einsum", list(operands), [sizes[letter] for letter in result], equation=equation)


def attention(g: Growing) -> None:
    """As exporters write it: q kᵀ, a scale, a mask, a softmax, a product with v."""
    batch: Size = "n" if g.is_symbolic else g.pick(1, 2)
    length: Size = "h" if g.is_symbolic and g.chance(0.4) else g.pick(1, 1, 2, 3, 7, 17)
    keys = length if g.chance(0.5) else g.pick(1, 2, 5, 9)
    heads, features, values = g.pick(1, 2, 3), g.pick(1, 2, 4, 8, 16), g.pick(1, 3, 8, 16)
    q = g.enter([batch, heads, length, features])
    k, v = g.enter([batch, heads, keys, features]), g.enter([batch, heads, keys, values])
    transposed = g.move("Transpose", [k], [batch, heads, features, keys], perm=[0, 1, 3, 2])
    scores: list[Size] = [batch, heads, length, keys]
    s = g.make("MatMul", [q, transposed], scores)
    s = g.make(g.pick("Mul", "Div"), [s, g.constant(np.float32(features**0.5 or 1))], scores)
    if g.chance(0.5):
        s = g.make("Add", [s, g.other(scores)], scores)
    p = g.make("Softmax", [s], scores, axis=-1)
    y = g.make("MatMul", [p, v], [batch, heads, length, values])
    if g.chance(0.5):
        shape = [batch, length, heads, values]
        y = g.move("Transpose", [y], shape, perm=[0, 2, 1, 3])
        flat: list[Size] = [batch, length, heads * values]
        target = [0, 0 if isinstance(length, str) else length, heads * values]
        g.move("Reshape", [y, g.numbers(target)], flat)


def attention_op(g: Growing) -> None:
    """The operator of opset 23."""
    batch: Size = "n" if g.is_symbolic else g.pick(1, 2)
    heads, group = g.pick(1, 2), g.pick(1, 2)
    length, keys = g.pick(1, 2, 5), g.pick(1, 3, 8)
    features, values = g.pick(1, 4, 8), g.pick(1, 4, 5)
    q = g.enter([batch, heads * group, length, features])
    k, v = g.enter([batch, heads, keys, features]), g.enter([batch, heads, keys, values])
    mask = None
    causal = g.chance(0.3)
    if not causal and g.chance(0.5):
        mask = g.enter([length, keys], np.bool_ if g.chance(0.3) else F32)
    if mask is not None and mask.dtype == np.bool_:
        return  # runtimes differ on rows without visible keys
    attrs = {"is_causal": int(causal), "scale": g.pick(None, 0.5), "softcap": g.pick(None, 2.0)}
    g.make("Attention", [q, k, v, mask], [batch, heads * group, length, values], **attrs)


def softmax(g: Growing) -> None:
    x = g.operand(ranks=(1, 2, 3, 4))
    axis = g.integer(-x.rank, x.rank - 1)
    if x.shape[axis] == 0:
        return
    op = g.pick("Softmax", "Softmax", "LogSoftmax", "Hardmax")
    if op == "Hardmax" and not x.exact:
        op = "Softmax"
    g.make(op, [x], x.shape, axis=axis)


def norm(g: Growing) -> None:
    x = g.operand(ranks=(1, 2, 3, 4))
    axis = g.integer(0, x.rank - 1)
    sizes = x.shape[axis:]
    if any(isinstance(s, str) or s == 0 for s in sizes):
        return
    scale, bias = g.constant(g.array(sizes)), g.constant(g.array(sizes))  # type: ignore[arg-type]
    if g.chance(0.5):
        axis -= x.rank
    if g.chance(0.6):
        given = [x, scale, bias] if g.chance(0.7) else [x, scale]
        g.make("LayerNormalization", given, x.shape, axis=axis, epsilon=0.1)
    else:
        g.make("RMSNormalization", [x, scale], x.shape, axis=axis, epsilon=0.1)


def reduce(g: Growing) -> None:
    x = g.operand(ranks=(1, 2, 3, 4, 5))
    axes = [axis for axis in range(x.rank) if g.chance(0.5)]
    op, keep = g.pick(*REDUCTIONS), g.chance(0.5)
    touched = axes or range(x.rank)
    if op not in ("ReduceSum", "ReduceL1", "ReduceSumSquare") and any(
        x.shape[axis] == 0 for axis in touched
    ):
        op = "ReduceSum"
    if op == "ReduceProd" and count([x.shape[axis] for axis in touched]) > 64:
        op = "ReduceMean"
    shape = [1 if axis in touched else s for axis, s in enumerate(x.shape)]
    if not keep:
        shape = [s for axis, s in enumerate(x.shape) if axis not in touched]
    signed = [axis - x.rank if g.chance(0.3) else axis for axis in axes]
    given = g.numbers(signed) if axes else None
    exact = x.exact and op in ("ReduceMax", "ReduceMin")
    g.make(op, [x, given], shape, keepdims=int(keep), exact=exact)


def arg_reduce(g: Growing) -> None:
    x = g.operand(ranks=(1, 2, 3, 4), exact=True)
    axis, keep = g.integer(-x.rank, x.rank - 1), g.chance(0.5)
    if x.shape[axis] == 0:
        return
    shape = [1 if at == axis % x.rank else s for at, s in enumerate(x.shape)]
    if not keep:
        shape = [s for at, s in enumerate(x.shape) if at != axis % x.rank]
    op = g.pick("ArgMax", "ArgMin")
    attrs = {"axis": axis, "keepdims": int(keep), "select_last_index": g.pick(0, 0, 1)}
    g.make(op, [x], shape, I64, True, **attrs)


def top_k(g: Growing) -> None:
    x = g.operand(ranks=(1, 2, 3, 4), exact=True)
    axis = g.integer(-x.rank, x.rank - 1)
    size = x.shape[axis]
    if isinstance(size, str) or size == 0:
        return
    k = g.integer(0 if g.chance(0.1) else 1, size)
    shape = [k if at == axis % x.rank else s for at, s in enumerate(x.shape)]
    results = [(F32, shape, True), (I64, shape, True)]
    g.nodes_of("TopK", [x, g.numbers([k])], results, axis=axis, largest=g.pick(0, 1), sorted=1)


def cumulative(g: Growing) -> None:
    x = g.operand(ranks=(1, 2, 3, 4))
    axis = g.decisive(np.array(g.integer(-x.rank, x.rank - 1)))
    g.make("CumSum", [x, axis], x.shape, exclusive=g.pick(0, 1), reverse=g.pick(0, 1))


def recurrent(g: Growing) -> None:
    op, gates = g.pick(("LSTM", 4), ("GRU", 3), ("RNN", 1))
    steps: Size = "h" if g.is_symbolic and g.chance(0.5) else g.pick(1, 2, 3, 5)
    batch: Size = "n" if g.is_symbolic and g.chance(0.5) else g.pick(1, 2, 3)
    inner, hidden = g.pick(1, 2, 3, 8, 17), g.pick(1, 2, 4, 7, 16)
    direction = g.pick("forward", "reverse", "bidirectional")
    directions = 2 if direction == "bidirectional" else 1
    x = g.enter([steps, batch, inner])
    w = g.constant(g.array([directions, gates * hidden, inner], inner**-0.5))
    r = g.constant(g.array([directions, gates * hidden, hidden], hidden**-0.5))
    bias = g.constant(g.array([directions, 2 * gates * hidden])) if g.chance(0.6) else None
    attrs = {"hidden_size": hidden, "direction": direction}
    if op == "GRU":
        attrs["linear_before_reset"] = g.pick(0, 1)
    start = g.enter([directions, batch, hidden]) if g.chance(0.3) else None
    results = [
        (F32, [steps, directions, batch, hidden], False),
        (F32, [directions, batch, hidden], False),
    ]
    g.nodes_of(op, [x, w, r, bias, None, start], results, **attrs)


def mean_variance(g: Growing) -> None:
    x = g.operand(ranks=(4,), exact=True)  # small differences would be amplified
    if 0 in x.shape:
        return
    shifted: Value = g.make("Mul", [x, g.constant(np.float32(3))], x.shape)
    axes = [axis for axis in range(4) if g.chance(0.6)] or [0, 2, 3]
    if count([x.shape[a] for a in axes]) < 4:
        return
    g.make("MeanVarianceNormalization", [shifted], x.shape, axes=axes)


STEPS = [
    *[matmul] * 4,
    *[product] * 3,
    *[gemm] * 2,
    einsum,
    *[attention] * 2,
    attention_op,
    *[softmax] * 2,
    *[norm] * 2,
    *[reduce] * 3,
    arg_reduce,
    top_k,
    cumulative,
    recurrent,
    mean_variance,
]
