"""PyTorch's layers by the names of ops: norms, convolutions, pooling, attention, recurrence."""

import numpy as np
import torch
from torch.nn import functional

from bitwright.ops.nn.attention import bias_of


class UnsupportedError(Exception):
    """PyTorch lacks an option of the op."""


def by_rank(name):
    """conv becomes conv1d, conv2d or conv3d."""
    return lambda rank: getattr(functional, f"{name}{rank}d")


def per_channel(values, x):
    return values.reshape(-1, *(1,) * (x.ndim - 2))


def affine(y, scale, bias):
    y = y if scale is None else y * scale
    return y if bias is None else y + bias


def ends_of(pads, rank):
    """Begins and ends of the padding of each axis."""
    pads = pads or (0,) * (2 * rank)
    return pads[:rank], pads[rank:]


def padded(x, pads, value=0.0):
    """x with padding of its spatial axes."""
    begins, ends = ends_of(pads, x.ndim - 2)
    pairs = [size for pair in reversed(list(zip(begins, ends, strict=True))) for size in pair]
    return functional.pad(x, pairs, value=value)


def symmetric(pads, rank):
    begins, ends = ends_of(pads, rank)
    if begins != ends:
        raise UnsupportedError("padding of both sides differs")
    return begins


def window(strides, dilations):
    """Options of convolutions; absent ones are 1."""
    return {"stride": strides or 1, "dilation": dilations or 1}


def conv(x, w, bias, strides, pads, dilations, groups):
    if not x.shape[1]:
        raise UnsupportedError("without channels, PyTorch's gradient of the bias is 0")
    function, options = by_rank("conv")(x.ndim - 2), window(strides, dilations)
    return function(padded(x, pads), w, bias, groups=groups, **options)


def conv_transpose(x, w, bias, strides, pads, dilations, output_padding, groups):
    rank = x.ndim - 2
    function, options = by_rank("conv_transpose")(rank), window(strides, dilations)
    begins, ends = ends_of(pads, rank)
    more = output_padding or (0,) * rank
    crops = (*(-n for n in begins), *(m - n for m, n in zip(more, ends, strict=True)))
    y = padded(function(x, w, groups=groups, **options), crops)
    return y if bias is None else y + per_channel(bias, x)


def col2im(x, image_shape, block_shape, strides, pads, dilations):
    if len(image_shape) != 2:
        raise UnsupportedError("PyTorch folds images of two axes")
    options = {"padding": symmetric(pads, 2), **window(strides, dilations)}
    return functional.fold(x, image_shape, block_shape, **options)


def max_pool(x, kernel, strides, pads, dilations, ceil, **_):
    if ceil:
        padding = symmetric(pads, x.ndim - 2)
    else:
        x, padding = padded(x, pads, -np.inf), 0
    options = {"padding": padding, "ceil_mode": ceil, "dilation": dilations or 1}
    return by_rank("max_pool")(x.ndim - 2)(x, kernel, strides or 1, **options)


def avg_pool(x, kernel, strides, pads, dilations, ceil, count_include_pad):
    if dilations and set(dilations) != {1}:
        raise UnsupportedError("averages have no dilation")
    padding = symmetric(pads, x.ndim - 2)
    options = {"ceil_mode": ceil, "count_include_pad": count_include_pad}
    return by_rank("avg_pool")(x.ndim - 2)(x, kernel, strides or 1, padding, **options)


def lp_pool(x, kernel, strides, pads, dilations, ceil, p):
    if ceil or (dilations and set(dilations) != {1}):
        raise UnsupportedError("averages have no dilation, and count what is there")
    powers = padded(x.abs() ** p, pads)
    means = by_rank("avg_pool")(x.ndim - 2)(powers, kernel, strides or 1)
    return (means * float(np.prod(kernel))) ** (1 / p)


def max_unpool(x, indices, shape):
    flat = torch.zeros(int(np.prod(shape)), dtype=x.dtype)
    return flat.scatter(0, indices.reshape(-1), x.reshape(-1)).reshape(shape)


def moments(x):
    axes = (0, *range(2, x.ndim))
    return x.mean(axes), x.var(axes, unbiased=False)


def batch_norm(x, scale, bias, mean, var, eps):
    rate = scale / torch.sqrt(var + eps)
    return (x - per_channel(mean, x)) * per_channel(rate, x) + per_channel(bias, x)


def batch_norm_train(x, scale, bias, eps):
    y = functional.batch_norm(x, None, None, scale, bias, training=True, eps=eps)
    return y, *moments(x)


def channel_sums(dy, x, mean):
    axes = (0, *range(2, x.ndim))
    return dy.sum(axes), (dy * (x - per_channel(mean, x))).sum(axes)


def group_norm(x, scale, bias, groups, eps):
    y = functional.group_norm(x, groups, eps=eps)
    return affine(y, *(None if v is None else per_channel(v, x) for v in (scale, bias)))


def normalized(function):
    def run(x, scale, bias, axis, eps):
        shape = x.shape[axis % x.ndim :]
        options = {"eps": eps} if eps else {}
        return affine(function(x, shape, **options), scale, bias)

    return run


def lp_norm(x, axis, p):
    if not x.abs().sum(axis).all():
        raise UnsupportedError("PyTorch divides by a small number instead of 0")
    return functional.normalize(x, p, axis)


def local_response_norm(x, size, alpha, beta, bias):
    if size % 2 == 0:
        raise UnsupportedError("windows of even size lie on the other side")
    return functional.local_response_norm(x, size, alpha, beta, bias)


def cross_entropy(logits, labels, weights, ignore_index, reduction, from_log_probs):
    """Written out: PyTorch's own has no gradient of weights."""
    rows = logits if from_log_probs else functional.log_softmax(logits, 1)
    kept = torch.ones_like(labels) if ignore_index is None else labels != ignore_index
    chosen = torch.where(kept.bool(), labels, 0).long()
    factors = (torch.ones(logits.shape[1]) if weights is None else weights)[chosen] * kept
    losses = -factors * rows.gather(1, chosen.unsqueeze(1)).squeeze(1)
    if reduction == "none":
        return losses
    return losses.sum() / factors.sum() if reduction == "mean" else losses.sum()


def attention(q, k, v, mask, past_k, past_v, lengths, scale, softcap, int8, **visible):
    if int8:
        raise UnsupportedError("scores in 8 bits")
    if past_k is not None:
        k, v = torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    scores = q @ k.mT * (q.shape[3] ** -0.5 if scale is None else scale)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    before = 0 if past_k is None else past_k.shape[2]
    limits = None if lengths is None else lengths.numpy()
    hidden = bias_of(None, limits, q.shape[2], k.shape[2], before, **visible)
    scores = scores + torch.tensor(hidden).to(scores.dtype)
    if mask is not None:
        if 1 < mask.shape[-1] < k.shape[2]:
            raise UnsupportedError("a mask of fewer keys")
        scores = (
            scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, -torch.inf)
        )
    if (scores == -torch.inf).all(-1).any():
        raise UnsupportedError("PyTorch gives NaN for a query that sees no key")
    return torch.softmax(scores, -1) @ v


def rotary(x, cos, sin, position_ids, interleaved, rotary_dim):
    if position_ids is not None:
        cos, sin = cos[position_ids.long()], sin[position_ids.long()]
    cos, sin = (table[..., None, :, :] for table in (cos, sin))
    count = rotary_dim or x.shape[3]
    turned, rest = x[..., :count], x[..., count:]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    return torch.cat([turned, rest], -1)


# PyTorch's order of gates, as places in the order of ONNX
GATES = {"rnn": (0,), "gru": (1, 0, 2), "lstm": (0, 2, 3, 1)}


def recurrent(op):
    """A layer by directions; only the standard activations."""

    def in_order(x):
        parts = x.chunk(len(GATES[op]), 0)
        return torch.cat([parts[place] for place in GATES[op]])

    def layer(x, w, r, bias, lengths, h0, c0=None, peephole=None, **attrs):
        options = ("activations", "alpha", "beta", "clip", "input_forget")
        if lengths is not None or peephole is not None or any(attrs.get(n) for n in options):
            raise UnsupportedError("lengths, peepholes and other activations")
        if op == "gru" and not attrs["linear_before_reset"]:
            raise UnsupportedError("PyTorch resets after the product")
        found = []
        directions = {"forward": [0], "reverse": [1], "bidirectional": [0, 1]}
        for i, back in enumerate(directions[attrs["direction"]]):
            biases = [] if bias is None else [in_order(part) for part in bias[i].chunk(2)]
            weights = [in_order(w[i]), in_order(r[i]), *biases]
            zeros = torch.zeros(1, x.shape[1], r.shape[2], dtype=x.dtype)
            states = [zeros if s is None else s[i : i + 1] for s in (h0, c0)]
            function = {"rnn": torch.rnn_tanh, "gru": torch.gru, "lstm": torch.lstm}[op]
            start = states if op == "lstm" else states[0]
            rows = x.flip(0) if back else x
            rest = (bool(biases), 1, 0.0, False, False, False)
            y, *finals = function(rows, start, weights, *rest)
            found.append((y.flip(0) if back else y, *(state[0] for state in finals)))
        ys, *finals = zip(*found, strict=True)
        return torch.stack(ys, 1), *(torch.stack(state) for state in finals)

    return layer


LAYERS = {
    "conv": conv,
    "conv_transpose": conv_transpose,
    "col2im": col2im,
    "max_pool": max_pool,
    "max_pool_indices": max_pool,
    "avg_pool": avg_pool,
    "lp_pool": lp_pool,
    "max_unpool": max_unpool,
    "batch_norm": batch_norm,
    "batch_norm_train": batch_norm_train,
    "channel_moments": moments,
    "channel_sums": channel_sums,
    "group_norm": group_norm,
    "instance_norm": lambda x, scale, bias, eps: group_norm(x, scale, bias, x.shape[1], eps),
    "lrn": local_response_norm,
    "layer_norm": normalized(functional.layer_norm),
    "rms_norm": normalized(functional.rms_norm),
    "lp_norm": lp_norm,
    "softmax": lambda x, axis: torch.softmax(x, axis),
    "log_softmax": lambda x, axis: torch.log_softmax(x, axis),
    "cross_entropy": cross_entropy,
    "attention": attention,
    "rotary": rotary,
    "rnn": recurrent("rnn"),
    "gru": recurrent("gru"),
    "lstm": recurrent("lstm"),
}
