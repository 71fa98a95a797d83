"""Products with weights in stored blocks (`ops.quant.block_formats`).

    block_matmul           x @ dequantize(blocks).T + bias
    block_grouped_matmul   the same per expert, rows of x sorted by expert
    block_gather           rows of dequantize(blocks), for embedding tables

The default form quantizes x per run of 32 elements to 8 bits and adds integer products,

    y = Σ_runs a w (Σ qx qw) - a m (Σ qx)      a, w scales of x and of the weights, m minimums

Runs with outliers, whose peak is beyond `outlier` times the root mean square of their row, have a
second level of 8 bits; with 0 every run has one. The `exact` form multiplies x by the dequantized
weights. Floats (F32, F16, BF16) are exact. A row of the result depends on its row of x only: not on
the number of rows, nor on threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bitwright.errors import BitwrightError, InferenceError
from bitwright.ir.dim import Size
from bitwright.ir.dtype import f32, u8
from bitwright.ir.types import TensorType
from bitwright.ops.core import expect
from bitwright.ops.core.opdef import (
    Array,
    Attr,
    Kind,
    NonDifferentiable,
    OpDef,
    Sample,
    draw,
    sample,
)
from bitwright.ops.math.matmul import (
    add_bias,
    multiply,
    multiply_grouped,
    require_bias,
    require_counts,
)
from bitwright.ops.quant.block_formats import (
    FORMATS,
    LEVEL,
    OUTLIER,
    RUN,
    BlockFormat,
    format_named,
    quantize_runs,
)
from bitwright.ops.shape.gather import checked_indices

_NO_GRADIENT = NonDifferentiable(
    "weights in stored blocks are constants; dequantize them to train the model"
)
_ATTRS = {"format": Attr("str", choices=tuple(FORMATS)), "exact": Attr("bool", False)}
_ATTRS["outlier"] = Attr("float", OUTLIER)


def _columns(blocks: TensorType, form: BlockFormat) -> Size:
    """The number of weights in a row of blocks."""
    width = blocks.shape[-1]
    if not isinstance(width, int) or width % form.nbytes:
        raise InferenceError(
            "the rows of blocks have no whole number of blocks",
            expected=f"a known multiple of {form.nbytes} bytes for {form.name}",
            found=blocks,
        )
    return width // form.nbytes * form.elements


def _require(x: TensorType, blocks: TensorType, rank: int, form: BlockFormat) -> None:
    expect.element("x", x, f32)
    expect.element("blocks", blocks, u8)
    expect.rank("blocks", blocks, rank)
    if not x.rank:
        raise InferenceError("x has the wrong rank", expected="rank 1 or more", found=x)
    expect.size("the last axis of x", x.shape[-1], _columns(blocks, form))


def _infer(
    x: TensorType,
    blocks: TensorType,
    bias: TensorType | None,
    format: str,
    exact: bool,
    outlier: float,
) -> TensorType:
    _require(x, blocks, 2, format_named(format))
    require_bias(bias, x.dtype, blocks.shape[0])
    return x.with_shape((*x.shape[:-1], blocks.shape[0]))


def _infer_grouped(
    x: TensorType, blocks: TensorType, counts: TensorType, format: str, exact: bool, outlier: float
) -> TensorType:
    expect.rank("x", x, 2)
    _require(x, blocks, 3, format_named(format))
    require_counts(counts, blocks.shape[0])
    return x.with_shape((x.shape[0], blocks.shape[1]))


def _rows(x: Array, form: BlockFormat, exact: bool, outlier: float) -> Array:
    """The rows as the product sees them: quantized and dequantized again, or unchanged."""
    if exact or form.is_float:
        return x
    q, rest, scale = quantize_runs(x, outlier)
    values = (q + rest.astype(np.float64) / LEVEL) * scale[..., None]
    return np.asarray(values.reshape(x.shape))


def _weights(blocks: Array, form: BlockFormat) -> Array:
    if blocks.shape[-1] % form.nbytes:  # a symbolic size, which inference does not know
        raise BitwrightError("the rows of blocks have no whole number of blocks")
    return form.dequantize(blocks).astype(np.float64)


def _product(
    x: Array, blocks: Array, bias: Array | None, format: str, exact: bool, outlier: float
) -> Array:
    form = format_named(format)
    return add_bias(multiply(_rows(x, form, exact, outlier), _weights(blocks, form).T), bias)


def _grouped(
    x: Array, blocks: Array, counts: Array, format: str, exact: bool, outlier: float
) -> Array:
    form = format_named(format)
    weights = _weights(blocks, form).swapaxes(1, 2)
    return multiply_grouped(_rows(x, form, exact, outlier), weights, counts)


def _infer_gather(blocks: TensorType, indices: TensorType, format: str) -> TensorType:
    expect.element("blocks", blocks, u8)
    expect.rank("blocks", blocks, 2)
    expect.integer("indices", indices)
    return TensorType(f32, (*indices.shape, _columns(blocks, format_named(format))))


def _gather(blocks: Array, indices: Array, format: str) -> Array:
    return format_named(format).dequantize(blocks[checked_indices(indices, len(blocks), 0)])


def random_blocks(*rows: int, form: BlockFormat, blocks: int = 1, seed: int = 0) -> Array:
    """Random blocks with moderate scales: u8[*rows, blocks * bytes]."""
    rng = np.random.default_rng(seed)
    if form.is_float:
        values = rng.uniform(-2, 2, (*rows, blocks * RUN)).astype(np.float32)
        if form.name == "BF16":
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return values.astype(np.float16 if form.name == "F16" else np.float32).view(np.uint8)
    data = rng.integers(0, 256, (*rows, blocks, form.nbytes), dtype=np.uint8)
    if form.name == "MXFP4":
        data[..., 0] = rng.integers(120, 126, data.shape[:-1])
    for place in _HALVES.get(form.name, (0,)) if form.name != "MXFP4" else ():
        values = rng.uniform(0.01, 0.1, data.shape[:-1]).astype(np.float16)
        data[..., place : place + 2] = values[..., None].view(np.uint8)
    return data.reshape(*rows, -1)


# The places of f16 numbers in a block, where they are not its first two bytes.
_HALVES = {
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
}


def _samples_of(make: Callable[[BlockFormat, int], Sample]) -> Callable[[], list[Sample]]:
    return lambda: [make(form, number) for number, form in enumerate(FORMATS.values())]


def _sample(form: BlockFormat, number: int) -> Sample:
    weights = random_blocks(17, form=form, blocks=2, seed=number)
    depth = weights.shape[-1] // form.nbytes * form.elements
    shape = ((3,), (), (2, 3), (1,))[number % 4]
    bias = draw(17, seed=2) if number % 3 == 0 else None
    x = draw(*shape, depth, seed=number)
    x[..., 5] *= 40 * (number % 3)
    is_exact, outlier = number % 2 == 1, (3.0, 0.0)[number % 4 // 2]
    return sample(x, weights, bias, format=form.name, exact=is_exact, outlier=outlier)


def _grouped_sample(form: BlockFormat, number: int) -> Sample:
    weights = random_blocks(2, 5, form=form, seed=number)
    depth = weights.shape[-1] // form.nbytes * form.elements
    counts = np.array([[3, 1], [0, 4]][number % 2])
    return sample(draw(4, depth, seed=1), weights, counts, format=form.name)


def _gather_sample(form: BlockFormat, number: int) -> Sample:
    weights = random_blocks(19, form=form, blocks=2, seed=number)
    indices = (np.array([[0, 18], [-1, 2]]), np.array(3, np.int32), np.zeros(0, np.int64))
    return sample(weights, indices[number % 3], format=form.name, tolerance=0.0)


def _flops(xs: Any, ys: Any, attrs: Any) -> Any:
    return 2 * ys[0].count * xs[0].shape[-1]


OPDEFS = [
    OpDef(
        "block_matmul",
        Kind.COMPUTE,
        "x, blocks, bias?",
        infer=_infer,
        reference=_product,
        takes_epilogue=True,
        flops=_flops,
        samples=_samples_of(_sample),
        grad=_NO_GRADIENT,
        attrs=_ATTRS,
        doc="x @ dequantize(blocks).T + bias with weights in blocks of a stored format.",
        fixed_types=True,
    ),
    OpDef(
        "block_grouped_matmul",
        Kind.COMPUTE,
        "x, blocks, counts",
        infer=_infer_grouped,
        reference=_grouped,
        flops=_flops,
        samples=_samples_of(_grouped_sample),
        grad=_NO_GRADIENT,
        attrs=_ATTRS,
        doc="block_matmul per expert with blocks[E, N, bytes]; rows of x are sorted by expert.",
        fixed_types=True,
    ),
    OpDef(
        "block_gather",
        Kind.MOVEMENT,
        "blocks, indices",
        infer=_infer_gather,
        reference=_gather,
        samples=_samples_of(_gather_sample),
        grad=_NO_GRADIENT,
        attrs={"format": _ATTRS["format"]},
        doc="Rows of a table in blocks of a stored format, dequantized.",
        fixed_types=True,
        is_foldable=False,
    ),
]
