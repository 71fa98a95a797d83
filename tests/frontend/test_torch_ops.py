"""ATen ops by family; each family is one module, because tracing is slow."""

import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as nnf
from torch_runs import Family, check

BATCH = {"args": ({0: "batch"},)}
SEQUENCE = {"args": ({0: "batch", 1: "seq"},)}
IMAGE = {"args": ({2: "height", 3: "width"},)}


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def plain(name, shift=0):
    function = getattr(torch, name)
    return lambda x: function(x + shift)


def test_functions_of_one_number():
    anywhere = "abs acos asin asinh atan atanh ceil cos cosh deg2rad erf erfc exp exp2 expm1 floor"
    anywhere += " frac isfinite isinf isnan log1p logical_not nan_to_num neg reciprocal relu round"
    anywhere += " sgn sigmoid sign sin sinc sinh square tan tanh trunc"
    functions = {name: plain(name) for name in anywhere.split()}
    functions |= {
        name: plain(name, 2) for name in ("acosh", "log", "log2", "log10", "sqrt", "rsqrt")
    }
    check(Family(**functions), (torch.rand(3, 6) * 1.8 - 0.9,))


def test_activations():
    plain = "gelu silu mish hardswish hardsigmoid hardtanh relu6 leaky_relu elu selu celu softplus"
    plain += " softsign logsigmoid softshrink hardshrink tanhshrink glu rrelu"
    functions = {name: getattr(nnf, name) for name in plain.split()}
    functions |= {
        "gelu_tanh": lambda x: nnf.gelu(x, approximate="tanh"),
        "softplus_steep": lambda x: nnf.softplus(x, 2.0, 1.0),
        "elu_wide": lambda x: nnf.elu(x, 0.7),
        "threshold": lambda x: nnf.threshold(x, 0.2, 3.0),
        "prelu": lambda x: nnf.prelu(x, torch.arange(6.0)),
        "softmax": lambda x: nnf.softmax(x, -1),
        "softmax_f64": lambda x: nnf.softmax(x, 0, dtype=torch.float64),
        "log_softmax": lambda x: nnf.log_softmax(x, 1),
        "logit": lambda x: torch.logit(x.sigmoid()),
        "integer_relu": lambda x: (x * 4).int().relu(),
    }
    check(Family(**functions), (torch.randn(3, 6) * 2,))


def test_arithmetic_and_promotion():
    def example(n):
        return torch.randn(n, 4), torch.rand(4) + 0.5, torch.arange(n * 4).reshape(n, 4) % 7 + 1

    family = Family(
        add=lambda x, y, i: torch.add(x, y, alpha=3),
        rsub=lambda x, y, i: 1 - torch.rsub(x, y, alpha=2),
        mixed=lambda x, y, i: x * i,
        half=lambda x, y, i: x.half() + i,
        bfloat=lambda x, y, i: x.bfloat16() * y,
        zero_rank=lambda x, y, i: i * torch.tensor(2.5),
        true_divide=lambda x, y, i: i / 2,
        floor_divide=lambda x, y, i: torch.stack([i // 3, (-i) // 3]),
        floor_divide_float=lambda x, y, i: x // y,
        truncated=lambda x, y, i: torch.div(x, y, rounding_mode="trunc"),
        truncated_int=lambda x, y, i: torch.div(-i, 4, rounding_mode="trunc"),
        remainder=lambda x, y, i: x % y + (-i) % 3,
        fmod=lambda x, y, i: torch.fmod(x, y),
        power=lambda x, y, i: x**2 + y**x + 2.0**x,
        integer_power=lambda x, y, i: i**2,
        extremes=lambda x, y, i: torch.maximum(x, y) - torch.fmin(x, i),
        atan2=lambda x, y, i: torch.atan2(x, y),
        hypot=lambda x, y, i: torch.hypot(x, y),
        lerp=lambda x, y, i: torch.lerp(x, y, 0.3),
        addcmul=lambda x, y, i: torch.addcmul(x, y, y, value=0.5),
        logaddexp=lambda x, y, i: torch.logaddexp(x, y),
        compare=lambda x, y, i: torch.stack([i == 3, x < i, i >= 2.5, (x > 0) != (y > 1)]),
        logic=lambda x, y, i: torch.logical_and(i, x > 0) | ~(y > 1),
        copysign=lambda x, y, i: torch.copysign(y, x) + torch.signbit(x),
        bits=lambda x, y, i: ((i ^ 5) & ~i) << 2 >> 1,
        product_of_booleans=lambda x, y, i: (x > 0) * (x < 1),
        where=lambda x, y, i: torch.where(x > 0, i, y),
        where_numbers=lambda x, y, i: torch.where(x > 0, 1.0, 0.0),
        masked_fill=lambda x, y, i: x.masked_fill(i > 3, float("-inf")),
        clamp=lambda x, y, i: torch.clamp(x, -y, y).clamp(min=-0.5),
        clamp_int=lambda x, y, i: i.clamp(max=2.5),
        cast=lambda x, y, i: x.to(torch.int32) + i.bool(),
        isclose=lambda x, y, i: torch.isclose(x, x + 1e-9),
        by_size=lambda x, y, i: x * x.shape[0] / x.shape[0] ** 0.5,
    )
    shapes = {"args": ({0: "batch"}, None, {0: "batch"})}
    check(family, example(3), example(6), dynamic_shapes=shapes)


def test_reductions():
    family = Family(
        sums=lambda x: (x.sum(), x.sum(1), x.sum((0, 2), keepdim=True), (x > 0).sum()),
        sum_f64=lambda x: x.sum(dtype=torch.float64),
        means=lambda x: (x.mean(), x.mean(-1, keepdim=True), x.nanmean(1)),
        extremes=lambda x: (x.amax((1, 2)), x.amin(0), x.max(), x.max(1), x.min(-1, keepdim=True)),
        products=lambda x: (x.prod(), x.prod(1)),
        quantifiers=lambda x: ((x > 1).any(1), (x > -9).all(), (x > 0).count_nonzero(1)),
        moments=lambda x: (x.var(), x.var(1, unbiased=False), x.std((0, 1)), torch.var_mean(x, 2)),
        logsumexp=lambda x: x.logsumexp((1, 2)),
        norms=lambda x: (x.norm(), x.norm(1, dim=1), x.norm(float("inf"), dim=2), x.norm(3)),
        normalize=lambda x: nnf.normalize(x, dim=1),
        cosine=lambda x: nnf.cosine_similarity(x, x.flip(1), dim=2),
        args=lambda x: (x.argmax(), x.argmax(1), x.argmin(2, keepdim=True)),
        running=lambda x: (x.cumsum(1), x.cumprod(2), (x > 0).cumsum(0), x.logcumsumexp(1)),
        topk=lambda x: (x.topk(2), x.topk(2, dim=1, largest=False)),
        sort=lambda x: (x.sort(dim=1), x.sort(dim=0, descending=True), x.argsort(dim=-1)),
        ranks=lambda x: (x.median(1), x.median(), x.kthvalue(2, dim=1)),
        distances=lambda x: torch.cdist(x, x + 1),
        of_one_number=lambda x: (x[0, 0, 0].norm(1, 0), x[0, 0, 0].sum(0), x[0, 0, 0].argmax(0)),
    )
    check(family, *[(torch.randn(n, 4, 5),) for n in (3, 6)], dynamic_shapes=BATCH)


def test_movement():
    family = Family(
        views=lambda x: (x.view(x.shape[0], -1), x.reshape(-1, 6), x.flatten(0, 1)),
        unflatten=lambda x: x.unflatten(2, (2, 3)),
        axes=lambda x: (x.permute(2, 0, 1), x.transpose(1, 2), x[0].T, torch.movedim(x, 0, 2)),
        squeeze=lambda x: x.unsqueeze(0).squeeze(),
        expand=lambda x: x.unsqueeze(2).expand(-1, -1, 3, -1),
        join=lambda x: (torch.cat([x, x[:, :2], x * 2], 1), torch.stack([x, x], -1)),
        slices=lambda x: (x[:, 1:], x[:, :-1], x[:, ::2], x[..., -3:], x[:, -1], x[:, 0]),
        halves=lambda x: (x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :]),
        parts=lambda x: (x.chunk(2, -1), x.split([1, 5], -1), x.split(4, -1), x.unbind(2)),
        flip=lambda x: x.flip([1, 2]),
        roll=lambda x: (x.roll(1, 1), x.roll((-1, 2), (1, 2)), x[0].roll(3)),
        repeat=lambda x: (x.repeat(1, 2, 1), x.tile(2), x.repeat_interleave(2, 1)),
        pad=lambda x: (
            nnf.pad(x, (1, 2)),
            nnf.pad(x, (0, 0, 1, 0), value=3.0),
            nnf.pad(x, (-1, 0)),
        ),
        pad_modes=lambda x: [
            nnf.pad(x, (2, 1), mode=m) for m in ("reflect", "replicate", "circular")
        ],
        triangles=lambda x: (x.tril(), x.triu(1)),
        diagonals=lambda x: (x.diagonal(dim1=1, dim2=2), x.diagonal(1, 0, 1), x.diag_embed()),
        windows=lambda x: (x.unfold(2, 3, 2), x.unfold(1, 2, 1)),
        shuffle=lambda x: nnf.pixel_shuffle(x.unsqueeze(1).expand(-1, 4, -1, -1), 2),
        mesh=lambda x: torch.meshgrid(x[0, :, 0], x[0, 0], indexing="ij"),
    )
    check(family, *[(torch.randn(*s, 6),) for s in ((2, 4), (3, 7))], dynamic_shapes=SEQUENCE)


def test_creation():
    family = Family(
        arange=lambda x: torch.arange(x.shape[1]) * torch.arange(x.shape[1], 0, -1),
        arange_odd=lambda x: torch.arange(1, x.shape[1] + 1, 2, dtype=torch.float32),
        constants=lambda x: (torch.arange(0, 1, 0.25), torch.linspace(0, 1, 5), torch.eye(3, 4)),
        zeros=lambda x: torch.zeros(x.shape[0], 3),
        like=lambda x: torch.ones_like(x) + torch.full_like(x, -1.0) + x.new_zeros(x.shape[2]),
        full=lambda x: torch.full((2, x.shape[1]), 7),
        eye=lambda x: torch.eye(x.shape[1]),
        causal_mask=lambda x: torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1),
        distances=lambda x: (torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])).abs(),
        one_hot=lambda x: nnf.one_hot(torch.arange(x.shape[1]) % 3, 3),
        triangle=lambda x: torch.tril_indices(3, 3),
        by_count=lambda x: x / x.numel(),
    )
    check(family, *[(torch.randn(*s, 6),) for s in ((2, 4), (3, 7))], dynamic_shapes=SEQUENCE)


def test_indexing():
    def example(n, m):
        return torch.randn(n, m, 6), torch.randint(0, 4, (n, 3)), torch.randint(0, 6, (n, m, 6))

    first, second = torch.tensor([0, 1]), torch.tensor([1, 2])

    def in_place(x, i, j):
        y = x.clone()
        y[:, 0] = 1.0
        y[:, 1:3] = 2.0
        y[..., ::2] *= 3
        y[:, -1, 1] += 5
        y[:, second] += x[:, :2]
        y[first, :, second] = x[:2, :, 0]
        y[y > 3] = 0
        return y

    family = Family(
        gather=lambda x, i, j: (x.gather(2, j), x.index_select(2, second), nnf.embedding(i, x[0])),
        one=lambda x, i, j: (x[:, second], x[torch.tensor([0, -1])]),
        several=lambda x, i, j: (x[torch.arange(x.shape[0]), i[:, 0]], x[:, i[0], i[0]]),
        apart=lambda x, i, j: (x[first, :, second], x[torch.arange(x.shape[0])[:, None], i]),
        scatter=lambda x, i, j: (x.scatter(2, j, 0.5), x.scatter(2, i[:, None], x)),
        scatter_add=lambda x, i, j: x.scatter_add(2, j, x),
        scatter_reduce=lambda x, i, j: [
            x.scatter_reduce(2, j, x, how, include_self=own)
            for how, own in (("amax", True), ("prod", True), ("mean", False), ("amin", False))
        ],
        rows=lambda x, i, j: x.index_add(2, first, x[..., :2]).index_copy(1, second, x[:, :2]),
        index_fill=lambda x, i, j: x.index_fill(2, second, 9.0),
        index_put=lambda x, i, j: x.index_put((first, second), torch.tensor(5.0)),
        masked=lambda x, i, j: x.index_put((x > 0,), torch.tensor(0.0)),
        diagonal=lambda x, i, j: x.diagonal_scatter(torch.ones(x.shape[0], 3), 3, 1, 2)[:, :2],
        bucketize=lambda x, i, j: (
            torch.bucketize(x, torch.arange(-2.0, 2)),
            torch.bucketize(i, i[0].sort()[0], right=True),
        ),
        unique=lambda x, i, j: torch.unique(i % 2, return_inverse=True)[1],
        searchsorted=lambda x, i, j: torch.searchsorted(x.sort(-1)[0], x + 0.1),
        in_place=in_place,
    )
    shapes = {"args": ({0: "batch", 1: "seq"}, {0: "batch"}, {0: "batch", 1: "seq"})}
    check(family, example(2, 4), example(3, 7), dynamic_shapes=shapes)


def test_products():
    def example(n, m):
        return torch.randn(n, m, 6), torch.randn(n, 6, 5)

    def positive(y):
        return y @ y.mT + torch.eye(6)

    family = Family(
        matmul=lambda x, y: (x @ y, x[0] @ y[0], x @ torch.ones(6), x[0, 0] @ y[0, :, 0]),
        linear=lambda x, y: nnf.linear(x, torch.ones(3, 6) * 0.1, torch.arange(3.0)),
        baddbmm=lambda x, y: torch.baddbmm(torch.ones(1, 1, 5), x, y, beta=0.5, alpha=2),
        addmm=lambda x, y: torch.addmm(torch.ones(5), x[0], y[0], beta=2),
        addbmm=lambda x, y: torch.addbmm(torch.ones(x.shape[1], 5), x, y),
        einsum=lambda x, y: (torch.einsum("bij,bjk->bik", x, y), torch.einsum("...i->...", x)),
        bilinear=lambda x, y: nnf.bilinear(x, x, torch.ones(2, 6, 6), torch.ones(2)),
        tensordot=lambda x, y: torch.tensordot(x, y[0], dims=1),
        cross=lambda x, y: torch.linalg.cross(x[..., :3], x[..., 3:]),
        algebra=lambda x, y: (torch.linalg.inv(positive(y)), torch.logdet(positive(y))),
        solve=lambda x, y: torch.linalg.solve(positive(y), y),
    )
    shapes = {"args": ({0: "batch", 1: "seq"}, {0: "batch"})}
    check(family, example(2, 4), example(3, 5), dynamic_shapes=shapes, tolerance=1e-3)


def test_convolutions_and_pools():
    w, deep = torch.randn(4, 3, 3, 2), torch.randn(6, 1, 3, 3)
    family = Family(
        conv=lambda x: (nnf.conv2d(x, w, torch.ones(4)), nnf.conv2d(x, w, stride=2, padding=1)),
        grouped=lambda x: nnf.conv2d(x, deep, groups=3, dilation=2),
        unbatched=lambda x: nnf.conv2d(x[0], w, padding="same"),
        one=lambda x: nnf.conv1d(x[:, :, 0], w[..., 0], padding=1),
        three=lambda x: nnf.conv3d(x[:, None], w[:, :1, None]),
        transposed=lambda x: nnf.conv_transpose2d(x, deep[:3], stride=2, padding=1, groups=3),
        output_padding=lambda x: nnf.conv_transpose1d(
            x[:, :, 0], w[:3, :2, :, 0], stride=2, output_padding=1
        ),
        max_pool=lambda x: (nnf.max_pool2d(x, 3, 2, 1), nnf.max_pool2d(x, 3, 2, ceil_mode=True)),
        max_pool_dilated=lambda x: nnf.max_pool2d(x[0], 2, 1, dilation=2),
        max_pool_indices=lambda x: nnf.max_pool2d(x, 2, return_indices=True),
        max_pool_ranks=lambda x: (nnf.max_pool1d(x[:, :, 0], 3), nnf.max_pool3d(x[:, None], 2)),
        avg_pool=lambda x: (nnf.avg_pool2d(x, 3, 2, 1), nnf.avg_pool1d(x[:, :, 0], 3, 2)),
        avg_pool_valid=lambda x: nnf.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
        avg_pool_ceil=lambda x: nnf.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
        avg_pool_divisor=lambda x: nnf.avg_pool2d(x, 2, divisor_override=3),
        lp_pool=lambda x: nnf.lp_pool2d(x.abs(), 2, 2),
        adaptive=lambda x: (nnf.adaptive_avg_pool2d(x, 1), nnf.adaptive_max_pool2d(x, 1)),
        adaptive_one_axis=lambda x: nnf.adaptive_avg_pool2d(x, (None, 1)),
        unfold=lambda x: nnf.unfold(x, 3, padding=1),
    )
    sizes = [(torch.randn(n, 3, h, w),) for n, h, w in ((2, 9, 11), (2, 12, 17))]
    check(family, *sizes, dynamic_shapes=IMAGE)


def test_adaptive_pools_that_divide_unevenly():
    family = Family(
        even=lambda x: nnf.adaptive_avg_pool2d(x, (3, 5)),
        uneven=lambda x: nnf.adaptive_avg_pool2d(x, (4, 7)),
        larger=lambda x: nnf.adaptive_max_pool2d(x, (4, 12)),
        indices=lambda x: nnf.adaptive_max_pool2d(x, (3, 5), return_indices=True),
        folded=lambda x: nnf.fold(nnf.unfold(x[..., :8, :8], 2, stride=2), (8, 8), 2, stride=2),
    )
    check(family, *[(torch.randn(n, 3, 9, 10),) for n in (2, 3)], dynamic_shapes=BATCH)


def test_normalization():
    mean, var, w = torch.rand(4), torch.rand(4) + 0.5, torch.rand(4)
    family = Family(
        batch=lambda x: (
            nnf.batch_norm(x, mean, var, w, mean),
            nnf.batch_norm(x[..., 0], mean, var),
        ),
        batch_own=lambda x: nnf.batch_norm(x, None, None, training=True),
        layer=lambda x: (
            nnf.layer_norm(x, (5,)),
            nnf.layer_norm(x, (5,), torch.ones(5), torch.ones(5)),
        ),
        group=lambda x: nnf.group_norm(x, 2, w, mean, 1e-3),
        instance=lambda x: nnf.instance_norm(x, weight=w, bias=mean),
        rms=lambda x: (nnf.rms_norm(x, (5,), torch.arange(5.0), 1e-6), nnf.rms_norm(x, (5,))),
        local_response=lambda x: nnf.local_response_norm(x, 3),
    )
    sizes = [(torch.randn(n, 4, h, 5) * 2 + 1,) for n, h in ((2, 3), (4, 7))]
    check(family, *sizes, dynamic_shapes={"args": ({0: "batch", 2: "height"},)})


def test_resizing():
    def sized(mode, **rest):
        return lambda x: nnf.interpolate(x, mode=mode, **rest)

    family = Family(
        nearest=sized("nearest", scale_factor=2),
        nearest_by_fraction=sized("nearest", scale_factor=1.5),
        nearest_to_size=sized("nearest", size=(7, 5)),
        nearest_exact=sized("nearest-exact", scale_factor=0.5),
        bilinear=sized("bilinear", scale_factor=2),
        bilinear_down=sized("bilinear", scale_factor=0.6),
        corners=sized("bilinear", size=(7, 13), align_corners=True),
        corners_by_factor=sized("bilinear", scale_factor=1.5, align_corners=True),
        bicubic=sized("bicubic", scale_factor=2),
        antialiased=sized("bilinear", size=(4, 6), antialias=True),
        antialiased_cubic=sized("bicubic", size=(4, 6), antialias=True),
        to_own_size=lambda x: nnf.interpolate(x, size=(x.shape[2] * 2, x.shape[3] + 1)),
        other_ranks=lambda x: nnf.interpolate(x[:, :, 0], scale_factor=2, mode="linear"),
    )
    sizes = [(torch.randn(n, 3, h, w),) for n, h, w in ((2, 9, 11), (2, 12, 17))]
    check(family, *sizes, dynamic_shapes=IMAGE)


def test_grid_sampling():
    def example(n):
        return torch.randn(n, 3, 6, 7), torch.rand(n, 4, 5, 2) * 2.4 - 1.2

    family = Family(
        linear=lambda x, g: nnf.grid_sample(x, g, align_corners=False),
        nearest=lambda x, g: nnf.grid_sample(x, g, "nearest", "border", align_corners=True),
        cubic_border=lambda x, g: nnf.grid_sample(x, g, "bicubic", "border", align_corners=True),
        cubic=lambda x, g: nnf.grid_sample(x, g, "bicubic", "reflection", align_corners=False),
    )
    shapes = {"args": ({0: "batch"}, {0: "batch"})}
    check(family, example(2), example(3), dynamic_shapes=shapes)


def test_attention_in_every_layout():
    def example(n, m):
        q, k, v = torch.randn(3, n, 4, m, 8)
        return q, k, v, torch.rand(n, m) > 0.2, torch.randn(n, 2, m, 8)

    sdpa = nnf.scaled_dot_product_attention
    family = Family(
        plain=lambda q, k, v, mask, few: sdpa(q, k, v, scale=0.3),
        causal=lambda q, k, v, mask, few: sdpa(q, k, v, is_causal=True),
        hidden=lambda q, k, v, mask, few: sdpa(q, k, v, mask[:, None, None, :]),
        added=lambda q, k, v, mask, few: sdpa(q, k, v, q @ k.mT),
        three_axes=lambda q, k, v, mask, few: sdpa(q[:, 0], k[:, 0], v[:, 0]),
        five_axes=lambda q, k, v, mask, few: sdpa(q[None], k[None], v[None]),
        shared_keys=lambda q, k, v, mask, few: sdpa(q, k[:1], v[:1]),
        grouped=lambda q, k, v, mask, few: sdpa(q, few, few, enable_gqa=True),
    )
    shapes = {"args": ({2: "seq"}, {2: "seq"}, {2: "seq"}, {1: "seq"}, {2: "seq"})}
    check(family, example(2, 5), example(2, 7), dynamic_shapes=shapes)


def test_losses():
    def example(n):
        return torch.randn(n, 5), torch.randint(0, 5, (n,)), torch.rand(n, 5), torch.randn(n, 5)

    def cross_entropy(**options):
        return lambda x, label, p, y: nnf.cross_entropy(x, label, **options)

    family = Family(
        mean=cross_entropy(),
        none=cross_entropy(reduction="none"),
        weighted=cross_entropy(reduction="sum", weight=torch.arange(5.0) + 1, ignore_index=2),
        smoothed=cross_entropy(label_smoothing=0.1),
        probabilities=lambda x, label, p, y: nnf.cross_entropy(x, p, label_smoothing=0.1),
        nll=lambda x, label, p, y: nnf.nll_loss(x.log_softmax(1), label),
        squared=lambda x, label, p, y: nnf.mse_loss(x, y) + nnf.huber_loss(x, y),
        binary=lambda x, label, p, y: nnf.binary_cross_entropy_with_logits(x, p),
        divergence=lambda x, label, p, y: nnf.kl_div(x.log_softmax(1), p, reduction="batchmean"),
    )
    check(family, example(3), example(6), dynamic_shapes={"args": ({0: "batch"},) * 4})


def test_complex_numbers_and_transforms():
    def example(n):
        return torch.randn(n, 12), torch.randn(n, 3, 2)

    fft, of = torch.fft, torch.view_as_complex
    family = Family(
        real=lambda x, z: torch.view_as_real(fft.rfft(x)),
        back=lambda x, z: fft.irfft(fft.rfft(x) * 2),
        two_sided=lambda x, z: fft.fft(x).abs() + fft.ifft(fft.fft(x)).real,
        orthogonal=lambda x, z: fft.rfft(x, norm="ortho").imag,
        two_axes=lambda x, z: fft.irfft2(fft.rfft2(x.reshape(-1, 3, 4))),
        polar=lambda x, z: torch.view_as_real(of(z) * torch.polar(torch.ones(3), torch.ones(3))),
        angle=lambda x, z: (of(z) + 1.0).angle(),
        stft=lambda x, z: torch.stft(
            x, 8, 2, window=torch.hann_window(8), return_complex=True
        ).abs(),
    )
    check(family, example(2), example(3), dynamic_shapes={"args": ({0: "batch"},) * 2})


def test_fake_quantization():
    scales, zeros = torch.tensor([0.1, 0.2, 0.3]), torch.zeros(3, dtype=torch.int32)
    family = Family(
        tensor=lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 3, 0, 15),
        channels=lambda x: torch.fake_quantize_per_channel_affine(x, scales, zeros, 1, -8, 7),
    )
    check(family, *[(torch.randn(n, 3),) for n in (4, 6)], dynamic_shapes=BATCH)
