"""PyTorch's functions by the names of ops, to compare gradients with.

A function takes tensors (None for an absent operand) and all attributes of the op. Where PyTorch
lacks an option, it raises `UnsupportedError`. `WITHOUT_FUNCTION` holds the reason for other ops.
"""

import numpy as np
import torch
from derived_cases import DIFFERENTIABLE
from finite_differences import stream
from torch.nn import functional
from torch_layers import LAYERS, UnsupportedError
from torch_movement import MOVEMENT

__all__ = ["FUNCTIONS", "WITHOUT_FUNCTION", "UnsupportedError", "torch_gradients"]

# fmt: off
SAME_NAME = (
    "abs", "acos", "acosh", "add", "asin", "asinh", "atan", "atan2", "atanh", "ceil", "cos", "cosh",
    "div", "erf", "exp", "expm1", "floor", "log", "log1p", "maximum", "minimum", "mul", "neg",
    "pow", "reciprocal", "relu", "round", "rsqrt", "sigmoid", "sign", "sin", "sinh", "sqrt", "sub",
    "tan", "tanh", "trunc",
)
# fmt: on


def torch_gradients(op, case, names):
    """Gradients of the named inputs, for the loss of `finite_differences.projected`."""
    leaves = []
    for i, x in enumerate(case.inputs):
        leaf = None if x is None else torch.tensor(np.asarray(x))
        leaves.append(leaf.requires_grad_() if f"in{i}" in names else leaf)
    absent = sum(not operand.variadic for operand in op.operands) - len(leaves)
    attrs = op.call_attrs(op.normal_attrs(case.attrs))
    try:
        answer = FUNCTIONS[op.name](*leaves, *[None] * absent, **attrs)
    except RuntimeError as error:
        if all(x is None or x.numel() for x in leaves):
            raise
        raise UnsupportedError(f"PyTorch takes no empty axis here: {error}") from None
    rng, total = stream(3), torch.zeros((), dtype=torch.float64)
    for y in answer if isinstance(answer, tuple) else (answer,):
        for part in (y.real, y.imag) if y.is_complex() else (y,):
            weights = torch.tensor(rng.uniform(0.5, 1.5, part.shape)).to(part.dtype)
            total = total + (part * weights).sum()
    wanted = {f"in{i}": x for i, x in enumerate(leaves) if f"in{i}" in names}
    found = torch.autograd.grad(total, list(wanted.values()), allow_unused=True)
    return {
        name: (torch.zeros_like(x) if g is None else g).resolve_conj().numpy()
        for (name, x), g in zip(wanted.items(), found, strict=True)
    }


def same(name):
    return lambda *xs, **attrs: getattr(torch, name)(*xs)


def running(function, start):
    """cumsum or cumprod; exclusive ones begin with `start`."""

    def run(x, axis, exclusive, reverse):
        x = x.flip(axis) if reverse else x
        y = function(x, axis)
        if exclusive and x.shape[axis]:
            first = torch.full_like(y.narrow(axis, 0, 1), start)
            y = torch.cat([first, y.narrow(axis, 0, x.shape[axis] - 1)], axis)
        return y.flip(axis) if reverse else y

    return run


def reduction(function):
    """A reduction over axes; PyTorch takes no axes for all of them."""

    def run(x, axes, keepdims):
        if function in (torch.amax, torch.amin) and not all(x.shape[axis] for axis in axes):
            raise UnsupportedError("PyTorch has no largest of nothing")
        return function(x, axes, keepdims) if axes else function(x[None], 0)

    return run


def product_over(x, axes, keepdims=False):
    for axis in sorted((axis % x.ndim for axis in np.atleast_1d(axes)), reverse=True):
        x = x.prod(axis, keepdim=keepdims)
    return x


def grouped(x, w, counts):
    parts = x.split(counts.tolist())
    return torch.cat([rows @ weight for rows, weight in zip(parts, w, strict=True)])


def grouped_weight(dy, x, counts):
    parts = zip(x.split(counts.tolist()), dy.split(counts.tolist()), strict=True)
    return torch.stack([rows.T @ slopes for rows, slopes in parts])


def low_rank(x, w, a, b, bias, scale):
    y = x @ w + scale * (x @ a) @ b
    return y if bias is None else y + bias


def shrink(x, lambd, bias):
    return torch.where(x < -lambd, x + bias, torch.where(x > lambd, x - bias, 0.0))


def clip(x, low, high):
    return x if low is None and high is None else torch.clamp(x, low, high)


def cast(x, to, **_):
    types = {"f32": torch.float32, "f64": torch.float64}
    if to.name not in types:
        raise UnsupportedError(f"casts to {to} are too coarse")
    return x.to(types[to.name])


def einsum(*xs, equation):
    try:
        return torch.einsum(equation, *xs)
    except RuntimeError as error:  # it does not broadcast the axes of a diagonal
        raise UnsupportedError(str(error)) from None


FUNCTIONS = {
    **{name: same(name) for name in SAME_NAME},
    "cumsum": running(torch.cumsum, 0.0),
    "cumprod": running(torch.cumprod, 1.0),
    "mod": lambda x, y, fmod: torch.fmod(x, y) if fmod else torch.remainder(x, y),
    "cast": cast,
    "conj": torch.conj,
    "real": lambda x: x.real,
    "imag": lambda x: x.imag,
    "complex": torch.complex,
    "squared_norm": lambda x: x.real**2 + x.imag**2,
    "einsum": einsum,
    "solve": torch.linalg.solve,
    "det": torch.linalg.det,
    "cofactors": lambda x: torch.linalg.det(x)[..., None, None] * torch.linalg.inv(x).mT,
    "matmul": torch.matmul,
    "lora_matmul": low_rank,
    "grouped_matmul": grouped,
    "grouped_matmul_backward_weight": grouped_weight,
    "reduce_sum": reduction(torch.sum),
    "reduce_mean": reduction(torch.mean),
    "reduce_prod": reduction(product_over),
    "reduce_max": reduction(torch.amax),
    "reduce_min": reduction(torch.amin),
    "reduce_l1": reduction(lambda x, *rest: x.abs().sum(*rest)),
    "reduce_l2": reduction(lambda x, *rest: torch.linalg.vector_norm(x, 2, *rest)),
    "reduce_log_sum_exp": reduction(torch.logsumexp),
    "softplus": functional.softplus,
    "softsign": functional.softsign,
    "silu": functional.silu,
    "mish": functional.mish,
    "gelu": functional.gelu,
    "hard_swish": functional.hardswish,
    "hard_sigmoid": lambda x, alpha, beta: torch.clamp(alpha * x + beta, 0, 1),
    "swish": lambda x, alpha: x * torch.sigmoid(alpha * x),
    "quick_gelu": lambda x, alpha: x * torch.sigmoid(alpha * x),
    "elu": functional.elu,
    "selu": lambda x, alpha, gamma: gamma * functional.elu(x, alpha),
    "celu": functional.celu,
    "leaky_relu": lambda x, alpha: functional.leaky_relu(x, alpha),
    "thresholded_relu": lambda x, alpha: functional.threshold(x, alpha, 0.0),
    "shrink": shrink,
    "clip": clip,
    "prelu": lambda x, slope: torch.where(x < 0, slope * x, x),
    "where": torch.where,
    **LAYERS,
    **MOVEMENT,
}

WITHOUT_FUNCTION = {
    **dict.fromkeys(("if", "loop", "scan", "fused"), "compared with a graph without it"),
    **dict.fromkeys(("optimization_barrier", "require", "identity"), "it is the identity"),
    "custom": "it belongs to its author",
    **dict.fromkeys(("random_uniform", "random_normal", "bernoulli"), "draws do not move"),
    "dropout": "PyTorch draws another mask",
    **{
        name: "a gradient itself, which the comparison of its op covers"
        for name in DIFFERENTIABLE
        if name.endswith("_backward") or name.startswith("conv_backward")
    },
    **dict.fromkeys(("lstm_train", "gru_train"), "what bw.grad makes of lstm and gru"),
    **dict.fromkeys(("dequant_matmul", "dequant_grouped_matmul", "dequantize"), "quantized"),
    **dict.fromkeys(("deform_conv", "roi_align", "max_roi_pool"), "torchvision has it"),
    **dict.fromkeys(("selective_scan", "gated_delta"), "other libraries have it"),
    "axial_rotary": "two rotary ops",
    "tensor_scatter": "scatter_elements with the indices of a cache",
}
