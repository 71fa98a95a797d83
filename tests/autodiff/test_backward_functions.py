"""`bw.nn`: gradients as plain functions, against PyTorch in f32, and their errors."""

import numpy as np
import pytest
import torch
from torch.nn import functional

import bitwright as bw
from bitwright.errors import BitwrightError


def normal(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def torch_gradients(function, dy, *arrays):
    """The gradients of the arrays by PyTorch."""
    leaves = [torch.tensor(x, requires_grad=True) for x in arrays]
    function(*leaves).backward(torch.tensor(dy))
    return [leaf.grad.numpy() for leaf in leaves]


def check(found, function, dy, *arrays):
    """Errors are relative to the largest gradient, or to dy where terms of its size cancel."""
    for one, other in zip(found, torch_gradients(function, dy, *arrays), strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        scale = max(np.max(np.abs(other), initial=0.0), np.max(np.abs(dy), initial=0.0))
        assert np.max(np.abs(one - other), initial=0.0) <= 1e-4 * scale


@pytest.mark.parametrize("rms", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("shape", [(3, 17), (2, 5, 64), (1, 1), (0, 8)])
def test_rms_norm(shape, rms):
    x, gamma, dy = rms * normal(*shape), normal(shape[-1], seed=1), normal(*shape, seed=2)
    found = bw.nn.rms_norm_backward(x, gamma, dy, eps=1e-6)
    size = shape[-1:]
    check(
        found,
        lambda x, g, b: functional.rms_norm(x, size, g, 1e-6) + b,
        dy,
        x,
        gamma,
        np.zeros_like(gamma),
    )


@pytest.mark.parametrize("shape", [(3, 17), (2, 5, 64), (4, 1)])
def test_layer_norm(shape):
    x, gamma, dy = normal(*shape), normal(shape[-1], seed=1), normal(*shape, seed=2)
    found = bw.nn.layer_norm_backward(x, gamma, dy, eps=1e-5)
    beta, size = np.zeros_like(gamma), shape[-1:]
    check(found, lambda x, g, b: functional.layer_norm(x, size, g, b, 1e-5), dy, x, gamma, beta)


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_group_norm(groups):
    x, gamma, dy = normal(2, 6, 5, 7), normal(6, seed=1), normal(2, 6, 5, 7, seed=2)
    found = bw.nn.group_norm_backward(x, gamma, dy, groups, eps=1e-5)
    beta = np.zeros_like(gamma)
    check(found, lambda x, g, b: functional.group_norm(x, groups, g, b, 1e-5), dy, x, gamma, beta)


def test_batch_norm():
    x, gamma, dy = normal(4, 6, 5, 7), normal(6, seed=1), normal(4, 6, 5, 7, seed=2)

    def forward(x, g, b):
        return functional.batch_norm(x, None, None, g, b, training=True, eps=1e-5)

    found = bw.nn.batch_norm_backward(x, gamma, dy, eps=1e-5)
    check(found, forward, dy, x, gamma, np.zeros_like(gamma))


def rotated(x, cos, sin, n_rot, interleaved):
    turned, rest = x[..., :n_rot], x[..., n_rot:]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    return torch.cat([turned, rest], -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("n_rot", [16, 6])
@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
def test_rope(lead, n_rot, interleaved):
    angles = normal(5, n_rot // 2)
    cos, sin, dy = np.cos(angles), np.sin(angles), normal(*lead, 5, 16)
    found = bw.nn.rope_backward(dy, cos, sin, n_rot, interleaved)
    tables = torch.tensor(cos), torch.tensor(sin)
    check(
        [found], lambda x: rotated(x, *tables, n_rot, interleaved), dy, normal(*lead, 5, 16, seed=1)
    )


@pytest.mark.parametrize("n_rot", [5, 18, 0, -2])
def test_wrong_n_rot_is_an_error(n_rot):
    with pytest.raises(
        BitwrightError, match=r"n_rot does not fit the features.*even number up to 16"
    ):
        bw.nn.rope_backward(normal(5, 16), normal(5, 8), normal(5, 8), n_rot)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_cumsum(axis, exclusive, reverse):
    dy = normal(4, 5, 3)

    def forward(x):
        x = x.flip(axis) if reverse else x
        y = x.cumsum(axis) - (x if exclusive else 0)
        return y.flip(axis) if reverse else y

    found = bw.nn.cumsum_backward(dy, axis, exclusive, reverse)
    check([found], forward, dy, normal(4, 5, 3, seed=1))


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_gather(axis):
    table, indices = normal(6, 7, 6), np.array([[0, 5], [-1, 0], [2, -6]])
    size = table.shape[axis]
    wrapped = torch.tensor(indices % size)

    def forward(x):
        return x.index_select(axis, wrapped.reshape(-1)).unflatten(axis, (3, 2))

    dy = forward(torch.tensor(table)).numpy()
    check([bw.nn.gather_backward(indices, dy, size, axis)], forward, dy, table)


def test_an_index_out_of_range_is_an_error():
    for index in (7, -8):
        with pytest.raises(BitwrightError, match=r"an index is out of range.*-7 to 6"):
            bw.nn.gather_backward(np.array([0, index]), normal(2, 3), 7)


POOLS = [
    {"kernel": 2},
    {"kernel": 3, "stride": 2, "padding": 1},
    {"kernel": (3, 2), "stride": (1, 2), "padding": (1, 0)},
    {"kernel": 3, "stride": 2, "ceil_mode": True},
]


@pytest.mark.parametrize("options", [*POOLS, {"kernel": 2, "stride": 1, "dilation": 2}])
def test_max_pool2d(options):
    x = normal(2, 3, 9, 8)
    x[0, 0, :2, :2] = 1.0  # a tie: the first one wins
    x[1, 2, 4, 4] = np.nan

    def forward(x):
        others = {name: value for name, value in options.items() if name != "kernel"}
        return functional.max_pool2d(x, options["kernel"], **others)

    dy = normal(*forward(torch.tensor(x)).shape, seed=1)
    check([bw.nn.max_pool2d_backward(x, dy, **options)], forward, dy, x)


@pytest.mark.parametrize("options", POOLS)
@pytest.mark.parametrize("counts", [False, True])
def test_avg_pool2d(options, counts):
    x = normal(2, 3, 9, 8)

    def forward(x):
        others = {name: value for name, value in options.items() if name != "kernel"}
        return functional.avg_pool2d(x, options["kernel"], count_include_pad=counts, **others)

    dy = normal(*forward(torch.tensor(x)).shape, seed=1)
    found = bw.nn.avg_pool2d_backward(x, dy, count_include_pad=counts, **options)
    check([found], forward, dy, x)


@pytest.mark.parametrize(
    "options",
    [{}, {"stride": 2, "padding": 1}, {"dilation": 2, "padding": (2, 1)}, {"groups": 2}],
)
def test_conv2d(options):
    groups = options.get("groups", 1)
    x, w, bias = normal(2, 4, 9, 8), normal(6, 4 // groups, 3, 3, seed=1), normal(6, seed=2)

    def forward(x, w, bias):
        return functional.conv2d(x, w, bias, **options)

    dy = normal(*forward(*map(torch.tensor, (x, w, bias))).shape, seed=3)
    check(bw.nn.conv2d_backward(x, w, dy, **options), forward, dy, x, w, bias)


@pytest.mark.parametrize(
    "shapes", [((5, 7), (7, 3)), ((2, 5, 7), (7, 3)), ((4, 1, 5, 7), (3, 7, 2)), ((7,), (7, 3))]
)
def test_matmul(shapes):
    x, w = normal(*shapes[0]), normal(*shapes[1], seed=1)
    dy = normal(*(x @ w).shape, seed=2)
    check(bw.nn.matmul_backward(x, w, dy), torch.matmul, dy, x, w)


@pytest.mark.parametrize("causal", [False, True])
def test_attention(causal):
    q, k, v = (normal(2, 4, 9, 16, seed=seed) for seed in range(3))
    dy = normal(2, 4, 9, 16, seed=3)

    def forward(q, k, v):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.3)

    check(bw.nn.attention_backward(q, k, v, dy, scale=0.3, causal=causal), forward, dy, q, k, v)


def test_attention_with_mask_and_softcap():
    q, k, v, dy = (normal(2, 2, 5, 8, seed=seed) for seed in range(4))
    mask = normal(5, 5, seed=4)

    def forward(q, k, v):
        scores = 3.0 * torch.tanh(q @ k.transpose(-1, -2) * 8**-0.5 / 3.0)
        return torch.softmax(scores + torch.tensor(mask), -1) @ v

    found = bw.nn.attention_backward(q, k, v, dy, mask=mask, softcap=3.0)
    check(found, forward, dy, q, k, v)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_softmax(axis):
    x, dy = normal(3, 5, 7), normal(3, 5, 7, seed=1)
    for name, forward in (("softmax", torch.softmax), ("log_softmax", torch.log_softmax)):
        y = forward(torch.tensor(x), axis).numpy()
        found = getattr(bw.nn, f"{name}_backward")(y, dy, axis)
        check([found], lambda x, forward=forward: forward(x, axis), dy, x)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("extra", [(), (4,)])
def test_cross_entropy(reduction, extra):
    logits, weights = normal(6, 5, *extra), np.abs(normal(5, seed=1))
    labels = np.random.default_rng(0).integers(0, 5, (6, *extra))
    labels.reshape(-1)[1] = -100
    dy = normal(6, *extra, seed=2) if reduction == "none" else np.float32(1.5)
    found = bw.nn.cross_entropy_backward(
        logits, labels, dy, weights, reduction=reduction, ignore_index=-100
    )
    targets, factors = torch.tensor(labels), torch.tensor(weights)
    check(
        [found],
        lambda x: functional.cross_entropy(
            x, targets, factors, reduction=reduction, ignore_index=-100
        ),
        dy,
        logits,
    )


ACTIVATIONS = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": functional.softplus,
    "mish": functional.mish,
    "hard_swish": functional.hardswish,
    "elu": functional.elu,
    "leaky_relu": functional.leaky_relu,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation(name):
    x, dy = 2 * normal(5, 33), normal(5, 33, seed=1)
    check([getattr(bw.nn, f"{name}_backward")(x, dy)], ACTIVATIONS[name], dy, x)


def test_every_activation_is_tested():
    from bitwright.nn import activations

    functions = {name for name in vars(activations) if name.endswith("_backward")} - {"_backward"}
    assert functions == {f"{name}_backward" for name in ACTIVATIONS}


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: bw.nn.group_norm_backward(normal(2, 6, 3), normal(6), normal(2, 6, 3), 4),
         "the groups do not divide the channels; expected a divisor of 6, found 4"),
        (lambda: bw.nn.rms_norm_backward(normal(2, 6), normal(5), normal(2, 6)),
         r"gamma has the wrong shape; expected \[6\], found \[5\]"),
        (lambda: bw.nn.layer_norm_backward(normal(2, 6), normal(6), normal(2, 5)),
         "dy has another type than x"),
        (lambda: bw.nn.softmax_backward(normal(2, 6), normal(2, 6, dtype=np.float64)),
         "dy has another type than y"),
        (lambda: bw.nn.max_pool2d_backward(normal(1, 1, 4, 4), normal(1, 1, 3, 3), 2),
         "dy is not a gradient of the result of max_pool"),
        (lambda: bw.nn.max_pool2d_backward(normal(1, 1, 4, 4), normal(1, 1, 2, 2), 2, padding=2),
         "the padding is more than half of the kernel"),
        (lambda: bw.nn.conv2d_backward(normal(1, 3, 4, 4), normal(2, 2, 3, 3), normal(1, 2, 2, 2)),
         "the weight does not fit the channels and groups"),
        (lambda: bw.nn.gather_backward(np.zeros(2), normal(2, 3), 4), "indices are not integers"),
        (lambda: bw.nn.gather_backward(np.zeros(3, int), normal(2, 3), 4),
         "dy does not fit the indices"),
        (lambda: bw.nn.cross_entropy_backward(normal(2, 3), np.array([0, 3])),
         "a label is out of range; expected 0 to 2, found 3"),
        (lambda: bw.nn.cumsum_backward(normal(2, 3), axis=2), "the axis is out of range"),
    ],
)  # fmt: skip
def test_bad_arguments_are_clear_errors(call, message):
    with pytest.raises(BitwrightError, match=message):
        call()


def test_a_signature_compiles_once():
    from bitwright.nn.compiled import _backward

    x, dy = normal(3, 9), normal(3, 9, seed=1)
    bw.nn.silu_backward(x, dy)
    before = _backward.cache_info().misses
    bw.nn.silu_backward(x + 1, dy)
    assert _backward.cache_info().misses == before
