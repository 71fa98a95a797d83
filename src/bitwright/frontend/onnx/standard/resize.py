"""Resize and Upsample of all opsets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bitwright.errors import ImportModelError
from bitwright.frontend.onnx.api import Context, Inputs, OnnxNode, Results, UnmappedError, imports
from bitwright.ir import UNKNOWN, Size, Value
from bitwright.ir.types import normalize_axis
from bitwright.ops.vision.resize import CROP, scaled_size


@imports("Upsample")
def upsample(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, scales = inputs[0], inputs[1]
    if scales is None:
        given = node.items("scales")
        if given is None:  # opset 1
            given = [1.0, 1.0, node.require("height_scale"), node.require("width_scale")]
        scales = ctx.const(np.array(given, np.float32), "f32")
    mode = {"bilinear": "linear"}.get(node.text("mode", "nearest"), node.text("mode", "nearest"))
    attrs = {"mode": mode, "coordinate_mode": "asymmetric", "nearest_mode": "floor"}
    return _by_scales(ctx, x, scales, None, None, attrs)


@imports("Resize")
def resize(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x = inputs[0]
    if node.version < 11:
        attrs: dict[str, Any] = {
            "mode": node.text("mode", "nearest"),
            "coordinate_mode": "asymmetric",
            "nearest_mode": "floor",
        }
        return _by_scales(ctx, x, inputs[1], None, None, attrs)
    roi, scales, sizes = inputs[1], inputs[2], inputs[3]
    attrs = {
        "mode": node.text("mode", "nearest"),
        "coordinate_mode": node.text("coordinate_transformation_mode", "half_pixel"),
        "nearest_mode": node.text("nearest_mode", "round_prefer_floor"),
        "cubic_coeff_a": node.number("cubic_coeff_a", -0.75),
        "exclude_outside": node.flag("exclude_outside"),
        "extrapolation_value": node.number("extrapolation_value", 0.0),
        "antialias": node.flag("antialias"),
    }
    if attrs["mode"] == "nearest":
        attrs["antialias"] = False
    axes = node.items("axes")
    if axes is not None:
        axes = [normalize_axis(axis, x.rank) for axis in axes]
    if attrs["coordinate_mode"] != CROP:
        roi = None
    if scales is not None and scales.shape != (0,):
        return _by_scales(ctx, x, scales, roi, axes, attrs)
    if sizes is None or sizes.shape == (0,):
        raise ImportModelError("has neither scales nor sizes", where=node.where)
    policy = node.text("keep_aspect_ratio_policy", "stretch")
    return _by_sizes(ctx, x, sizes, roi, axes, attrs, policy)


def _roi(ctx: Context, x: Value, roi: Value | None, axes: Sequence[int] | None) -> dict[str, Any]:
    """The region of interest as an attribute, with the start and end of every axis."""
    if roi is None:
        return {}
    region = [float(number) for number in ctx.need_array(roi, "the region").reshape(-1)]
    if axes is not None:
        whole = [0.0] * x.rank + [1.0] * x.rank
        for place, axis in enumerate(axes):
            whole[axis], whole[axis + x.rank] = region[place], region[place + len(axes)]
        region = whole
    return {"roi": tuple(region)}


def _by_scales(
    ctx: Context,
    x: Value,
    scales: Value | None,
    roi: Value | None,
    axes: Sequence[int] | None,
    attrs: dict[str, Any],
) -> Value:
    if scales is None:
        raise ImportModelError("its scales are missing")
    known = ctx.array(scales)
    if known is None or (roi is not None and ctx.array(roi) is None):
        some = axes not in (None, list(range(x.rank)))
        if some and roi is not None:
            raise UnmappedError("scales of some axes are computed from data")
        ctx.length(scales)
        if some:
            ones = ctx.const(np.ones(x.rank, np.float32), scales.dtype)
            scales = _spread(ctx, ones, scales, axes)
        return ctx.b.resize(x, None, scales, roi, **attrs)
    factors = [float(number) for number in known.reshape(-1)]
    if axes is not None:
        spread = dict(zip(axes, factors, strict=True))
        factors = [spread.get(axis, 1.0) for axis in range(x.rank)]
    region = _roi(ctx, x, roi, axes)
    ends = region.get("roi", (0.0,) * x.rank + (1.0,) * x.rank)
    sizes = [
        scaled_size(size, factor * (ends[axis + x.rank] - ends[axis]))
        for axis, (size, factor) in enumerate(zip(x.shape, factors, strict=True))
    ]
    if any(size is UNKNOWN for size in sizes):
        return ctx.b.resize(x, None, ctx.const(np.array(factors, np.float32), "f32"), **attrs)
    return ctx.b.resize(x, sizes=tuple(sizes), scales=tuple(factors), **region, **attrs)


def _spread(ctx: Context, whole: Value, given: Value, axes: Sequence[int] | None) -> Value:
    """A number for every axis: `given` for `axes`, `whole` for the others."""
    rank, places = whole.shape[0], dict(zip(axes or (), range(len(axes or ())), strict=True))
    order = [places[a] + rank if a in places else a for a in range(rank)]
    return ctx.b.gather(ctx.b.concat(whole, given, axis=0), ctx.const(order), axis=0)


def _by_sizes(
    ctx: Context,
    x: Value,
    sizes: Value,
    roi: Value | None,
    axes: Sequence[int] | None,
    attrs: dict[str, Any],
    policy: str,
) -> Value:
    known = ctx.sizes(sizes, x)
    if known is None:
        if policy != "stretch" or roi is not None:
            raise UnmappedError(f"the sizes {sizes} are computed from data")
        ctx.length(sizes)
        if axes not in (None, list(range(x.rank))):
            sizes = _spread(ctx, ctx.cast(ctx.shape_of(x), sizes.dtype), sizes, axes)
        return ctx.b.resize(x, sizes, **attrs)
    places = list(range(x.rank)) if axes is None else list(axes)
    goal: list[Size] = list(x.shape)
    for axis, size in zip(places, known, strict=True):
        goal[axis] = size
    if policy != "stretch":
        return _with_aspect_ratio(ctx, x, goal, places, attrs, policy)
    return ctx.b.resize(x, sizes=tuple(goal), **_roi(ctx, x, roi, axes), **attrs)


def _with_aspect_ratio(
    ctx: Context,
    x: Value,
    goal: Sequence[Size],
    axes: Sequence[int],
    attrs: dict[str, Any],
    policy: str,
) -> Value:
    if not all(isinstance(x.shape[a], int) and isinstance(goal[a], int) for a in axes):
        raise UnmappedError("the ratio of symbolic sizes is not known")
    ratios = [goal[axis] / x.shape[axis] for axis in axes]
    scale = min(ratios) if policy == "not_larger" else max(ratios)
    sizes = [
        int(np.floor(scale * size + 0.5)) if axis in axes else size
        for axis, size in enumerate(x.shape)
    ]
    scales = [scale if axis in axes else 1.0 for axis in range(x.rank)]
    return ctx.b.resize(x, sizes=tuple(sizes), scales=tuple(scales), **attrs)
