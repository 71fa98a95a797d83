"""Random numbers and sampling.

With a seed the draws are the same in every run; without one they come from numpy's default
generator, seeded by the system. `sample` is deterministic: uniform numbers are an operand, so a
backend can be compared with this reference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bitwright.errors import InferenceError, RunError
from bitwright.ir.dtype import DType, f32, i32, i64
from bitwright.ir.types import Shape, TensorType
from bitwright.ops.core import expect
from bitwright.ops.core.gradients import zero_gradient
from bitwright.ops.core.numeric import Array, wide
from bitwright.ops.core.opdef import Attr, Kind, NonDifferentiable, OpDef, Sample, draw, sample
from bitwright.ops.shape.gather import check_shape


def generator(seed: float | None) -> np.random.Generator:
    """A generator for a seed, which may be any number; equal seeds give equal streams."""
    if seed is None:
        return np.random.default_rng()
    return np.random.default_rng(int(np.float64(seed).view(np.uint64)))


# random tensors


def _infer_random(
    like: TensorType | None, shape: Shape | None, dtype: DType | None, **_: Any
) -> TensorType:
    expect.one_form("shape", shape, like)
    element = dtype or (like.dtype if like is not None else f32)
    found = TensorType(element, like.shape if like is not None else shape or ())
    expect.floating("the result", found)
    return found


def _shape(like: Array | None, shape: tuple[int, ...] | None) -> tuple[int, ...]:
    return shape or () if like is None else like.shape


def _uniform(like: Array | None, shape: Any, low: float, high: float, seed: Any, **_: Any) -> Array:
    return np.asarray(generator(seed).uniform(low, high, _shape(like, shape)))


def _normal(
    like: Array | None, shape: Any, mean: float, scale: float, seed: Any, **_: Any
) -> Array:
    return np.asarray(generator(seed).normal(mean, scale, _shape(like, shape)))


def _random_samples() -> list[Sample]:
    return [
        sample(shape=(2, 3), seed=1.5),
        sample(shape=(), seed=0.0, dtype="f64"),
        sample(shape=(0, 4), seed=-3.0),
        sample(draw(3, 2, dtype="f16"), seed=7.0),
        sample(draw(3, 2, dtype="i64"), seed=7.0, dtype="bf16"),
    ]


def _infer_bernoulli(x: TensorType, dtype: DType | None, seed: Any) -> TensorType:
    expect.floating("x", x)
    return x.with_dtype(dtype or x.dtype)


def _bernoulli(x: Array, dtype: DType | None, seed: float | None) -> Array:
    chance = wide(x)
    if not ((chance >= 0) & (chance <= 1)).all():
        wrong = chance[~((chance >= 0) & (chance <= 1))][0]
        raise RunError("a probability is out of range", expected="0 to 1", found=wrong)
    return (generator(seed).uniform(size=x.shape) < chance).astype(np.int64)


def _infer_multinomial(x: TensorType, sample_size: Any, dtype: DType, seed: Any) -> TensorType:
    expect.floating("x", x)
    expect.rank("x", x, 2)
    if dtype not in (i32, i64):
        raise InferenceError("choices are indices", expected="i32 or i64", found=dtype)
    return TensorType(dtype, (x.shape[0], sample_size))


def _multinomial(x: Array, sample_size: int, dtype: DType, seed: float | None) -> Array:
    draws = generator(seed).uniform(size=(len(x), sample_size))
    return np.asarray(_choose(_chances(wide(x)), draws))


# choices


def _chances(logits: Array) -> Array:
    """Softmax of each row; -inf has probability 0."""
    peak = logits.max(axis=-1, keepdims=True, initial=-np.inf)
    weights = np.exp(logits - np.where(np.isfinite(peak), peak, 0))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def _choose(chances: Array, draws: Array) -> Array:
    """For each draw, the first index at which the cumulative probability exceeds it."""
    if not chances.shape[-1]:
        raise RunError("there is nothing to choose from")
    edges = np.cumsum(chances, axis=-1)
    passed = (edges[:, None, :] <= draws[:, :, None] * edges[:, None, -1:]).sum(axis=-1)
    last = chances.shape[-1] - 1 - np.argmax(chances[:, ::-1] > 0, axis=-1)
    return np.asarray(np.minimum(passed, last[:, None]))


def _infer_sample(
    logits: TensorType, uniform: TensorType, temperature: float, top_k: int, top_p: float
) -> TensorType:
    for what, operand, rank in (("logits", logits, 2), ("uniform", uniform, 1)):
        expect.floating(what, operand)
        expect.rank(what, operand, rank)
    expect.size("uniform", uniform.shape[0], logits.shape[0])
    if temperature < 0 or top_k < 0 or not 0 < top_p <= 1:
        raise InferenceError(
            "a sampling setting is out of range",
            expected="temperature >= 0, top_k >= 0, 0 < top_p <= 1",
            found=f"{temperature}, {top_k}, {top_p}",
        )
    return TensorType(i64, (logits.shape[0],))


def _sample(logits: Array, uniform: Array, temperature: float, top_k: int, top_p: float) -> Array:
    check_shape("uniform", uniform.shape, logits.shape[:1])
    scores = wide(logits)
    if temperature == 0:
        return np.asarray(np.argmax(scores, axis=-1))
    order = np.argsort(-scores, axis=-1, kind="stable")
    scores = np.take_along_axis(scores, order, axis=-1) / temperature
    if top_k:
        scores = scores[:, :top_k]
    chances = _chances(scores)
    before = np.cumsum(chances, axis=-1) - chances
    chances = np.where(before < top_p, chances, 0)  # the largest one always stays
    chosen = _choose(chances, wide(uniform)[:, None])
    return np.take_along_axis(order, chosen, axis=-1)[:, 0]


def _sample_samples() -> list[Sample]:
    logits, uniform = draw(4, 9, low=-4, high=4), draw(4, seed=1, low=0, high=1)
    return [
        sample(logits, uniform),
        sample(logits, uniform, temperature=0.0),
        sample(logits, uniform, temperature=0.7, top_k=3),
        sample(logits, uniform, top_p=0.5),
        sample(logits, uniform, temperature=2.0, top_k=20, top_p=0.9),
        sample(draw(0, 9), draw(0)),
        sample(draw(2, 5, dtype="f16"), draw(2, seed=3, low=0, high=1)),
    ]


def _op(
    name: str, inputs: str, infer: Callable[..., Any], reference: Callable[..., Any], **rest: Any
) -> OpDef:
    # the draws depend on the shape of `like` only; a choice is piecewise constant
    rest.setdefault("grad", zero_gradient)
    return OpDef(name, Kind.REDUCTION, inputs, infer=infer, reference=reference, **rest)


_SEED = Attr("float", None)
_TENSOR = {"shape": Attr("sizes", None), "dtype": Attr("dtype", None), "seed": _SEED}
OPDEFS = [
    _op(
        "random_uniform",
        "like?",
        _infer_random,
        _uniform,
        deterministic=False,
        samples=_random_samples,
        attrs={**_TENSOR, "low": Attr("float", 0.0), "high": Attr("float", 1.0)},
        doc="Uniform draws from [low, high), of this shape or that of `like`.",
    ),
    _op(
        "random_normal",
        "like?",
        _infer_random,
        _normal,
        deterministic=False,
        samples=_random_samples,
        attrs={**_TENSOR, "mean": Attr("float", 0.0), "scale": Attr("float", 1.0)},
        doc="Normal draws with this mean and standard deviation, of this shape or that of `like`.",
    ),
    _op(
        "bernoulli",
        "x",
        _infer_bernoulli,
        _bernoulli,
        deterministic=False,
        samples=lambda: [
            sample(draw(3, 4, low=0, high=1), seed=1.0),
            sample(draw(5, low=0, high=1), seed=2.0, dtype="bool"),
            sample(draw(0, low=0, high=1), seed=2.0, dtype="i8"),
        ],
        attrs={"dtype": Attr("dtype", None), "seed": _SEED},
        doc="1 with probability x, else 0.",
    ),
    _op(
        "multinomial",
        "x",
        _infer_multinomial,
        _multinomial,
        grad=NonDifferentiable("its results are indices"),
        deterministic=False,
        samples=lambda: [
            sample(draw(3, 5), sample_size=4, seed=1.0),
            sample(draw(2, 5, dtype="f64"), sample_size=1, seed=2.0, dtype="i64"),
            sample(draw(2, 5), sample_size=0, seed=2.0),
        ],
        attrs={"sample_size": Attr("size", 1), "dtype": Attr("dtype", i32), "seed": _SEED},
        doc="Class indices drawn with replacement; a row of x holds log-probabilities, which "
        "need not be normalized.",
    ),
    _op(
        "sample",
        "logits, uniform",
        _infer_sample,
        _sample,
        samples=_sample_samples,
        grad=NonDifferentiable("its results are indices"),
        attrs={
            "temperature": Attr("float", 1.0),
            "top_k": Attr("int", 0),
            "top_p": Attr("float", 1.0),
        },
        doc="One token for each row. Tokens are sorted by descending logit (ties by index) and "
        "limited to the first top_k (0: all), then to the fewest whose probabilities reach top_p. "
        "The uniform number selects by cumulative probability. Temperature 0 takes the largest.",
    ),
]
