"""Upsampling and sampling on a grid."""

from __future__ import annotations

from typing import Any

from bitwright.frontend.torch.context import Context, maps
from bitwright.frontend.torch.scalars import scaled
from bitwright.ir.graph import Value

_NEAREST = {"mode": "nearest", "coordinate_mode": "asymmetric", "nearest_mode": "floor"}
_EXACT = {"mode": "nearest", "coordinate_mode": "half_pixel", "nearest_mode": "round_prefer_ceil"}
_GRID_MODES = ("linear", "nearest", "cubic")
_GRID_PADDING = ("zeros", "border", "reflection")


def _resize(ctx: Context, x: Value, output_size: Any, factors: Any, attrs: dict[str, Any]) -> Value:
    """The spatial axes resampled to a size or by factors, which also scale the coordinates."""
    aligned = attrs["coordinate_mode"] == "align_corners"
    if aligned and attrs.get("antialias"):
        raise ctx.refuse("antialiasing with aligned corners")
    outer, own = x.shape[:2], x.shape[2:]
    if output_size is None:
        output_size = [scaled(ctx, size, f) for size, f in zip(own, factors, strict=True)]
    sizes = [*outer, *output_size]
    if factors is not None and not aligned:
        attrs = {**attrs, "scales": (1.0, 1.0, *map(float, factors))}
    if ctx.usable(sizes, x):
        return ctx.b.resize(x, sizes=tuple(sizes), **attrs)
    if "scales" in attrs:
        scales = ctx.const(attrs.pop("scales"), "f32")
        return ctx.refine(ctx.b.resize(x, None, scales, **attrs), [*outer, *[None] * len(own)])
    return ctx.refine(ctx.b.resize(x, ctx.vector(sizes), **attrs), sizes)


def _smooth(mode: str, align_corners: bool, antialias: bool = False) -> dict[str, Any]:
    attrs: dict[str, Any] = {
        "mode": mode,
        "coordinate_mode": "align_corners" if align_corners else "half_pixel",
    }
    if antialias:  # as in PIL: another cubic, and samples outside are excluded
        attrs |= {"antialias": True, "exclude_outside": True, "cubic_coeff_a": -0.5}
    return attrs


def _nearest(attrs: dict[str, Any]) -> tuple[Any, Any]:
    def by_vector(ctx: Context, x: Value, size: Any, factors: Any = None) -> Value:
        return _resize(ctx, x, size, factors, dict(attrs))

    def by_numbers(ctx: Context, x: Value, size: Any, *factors: Any) -> Value:
        return _resize(ctx, x, size, _all_or_none(factors), dict(attrs))

    return by_vector, by_numbers


def _interpolated(mode: str, antialias: bool = False) -> tuple[Any, Any]:
    def by_vector(
        ctx: Context, x: Value, size: Any, align_corners: bool, factors: Any = None
    ) -> Value:
        return _resize(ctx, x, size, factors, _smooth(mode, align_corners, antialias))

    def by_numbers(ctx: Context, x: Value, size: Any, align: bool, *factors: Any) -> Value:
        return _resize(ctx, x, size, _all_or_none(factors), _smooth(mode, align, antialias))

    return by_vector, by_numbers


def _all_or_none(factors: tuple[Any, ...]) -> Any:
    return None if any(factor is None for factor in factors) else factors


def _register(name: str, functions: tuple[Any, Any]) -> None:
    maps(f"{name}.vec")(functions[0])
    maps(f"{name}.default")(functions[1])


for _rank in (1, 2, 3):
    _register(f"upsample_nearest{_rank}d", _nearest(_NEAREST))
    _register(f"_upsample_nearest_exact{_rank}d", _nearest(_EXACT))
_register("upsample_linear1d", _interpolated("linear"))
_register("upsample_bilinear2d", _interpolated("linear"))
_register("upsample_trilinear3d", _interpolated("linear"))
_register("upsample_bicubic2d", _interpolated("cubic"))
_register("_upsample_bilinear2d_aa", _interpolated("linear", antialias=True))
_register("_upsample_bicubic2d_aa", _interpolated("cubic", antialias=True))


@maps("grid_sampler.default", "grid_sampler_2d.default", "grid_sampler_3d.default")
def grid_sampler(
    ctx: Context, x: Value, grid: Value, mode: int, padding: int, align_corners: bool
) -> Value:
    names = {"mode": _GRID_MODES[mode], "padding_mode": _GRID_PADDING[padding]}
    if names == {"mode": "cubic", "padding_mode": "border"}:
        x, grid = _with_border(ctx, x, grid, int(align_corners))
    return ctx.b.grid_sample(x, grid, align_corners=align_corners, **names)


def _with_border(ctx: Context, x: Value, grid: Value, align: int) -> tuple[Value, Value]:
    """x with its border replicated twice on each side, and the grid for that.

    Torch clamps each tap of the cubic to the border; our op clamps the position first. Both give
    the same for positions at most two elements outside of x.
    """
    sizes = x.shape[:1:-1]  # a position lists the last axis first
    ratios = [
        ctx.b.div(*(ctx.scalar(n, grid.dtype) for n in (size - align, size - align + 4)))
        for size in sizes
    ]
    scale = ctx.b.concat(*(ctx.reshape(ratio, (1,)) for ratio in ratios), axis=0)
    pads = (0, 0, *[2] * len(sizes)) * 2
    return ctx.b.pad(x, pads=pads, mode="edge"), ctx.b.mul(grid, scale)
