"""Convolution, pooling and resampling: windows on spatial axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bitwright.export.onnx.forms import reshape, squeeze, unsqueeze
from bitwright.export.onnx.mapping import Ref, Scope, exports
from bitwright.export.onnx.mappings.integer_conv import integer_conv
from bitwright.export.onnx.mappings.norms import per_channel
from bitwright.export.onnx.sizes import sizes_tensor
from bitwright.ir import Dim, Shape, Size

Ints = Sequence[int] | None
Sizes = Sequence[Size] | None


def listed(values: Sequence[Any] | None, neutral: int) -> list[Any] | None:
    """Attribute values, or None if they are the default."""
    return None if values is None or set(values) == {neutral} else list(values)


def padded(e: Scope, x: Ref, pads: Sizes, fill: float) -> tuple[Ref, list[int] | None]:
    """x and the padding attribute; symbolic padding becomes a Pad before the node."""
    if not any(isinstance(n, Dim) for n in pads or ()):
        return x, listed(pads, 0)
    assert pads is not None
    rank = len(pads) // 2
    amounts = sizes_tensor(e, [0, 0, *pads[:rank], 0, 0, *pads[rank:]])
    y = e.Pad(x, amounts, e.scalar(fill, x), mode="constant")
    y.type = None
    return y, None


def window_attrs(strides: Ints, pads: Sizes, dilations: Ints) -> dict[str, Any]:
    return {
        "strides": listed(strides, 1),
        "pads": listed(pads, 0),
        "dilations": listed(dilations, 1),
    }


def static_windows(e: Scope, op_type: str, windows: dict[str, Any]) -> dict[str, Any]:
    """The attributes of an op that takes no symbolic padding."""
    if any(isinstance(n, Dim) for n in windows["pads"] or ()):
        raise e.reject(f"{op_type} takes no symbolic padding")
    return window_attrs(**windows)


@exports("conv")
def conv(
    e: Scope, x: Ref, w: Ref, bias: Ref | None, pads: Sizes, groups: int, **windows: Any
) -> Ref:
    rank, is_integer = x.rank, x.element.is_integer
    plain = x
    x, pads = padded(e, x, pads, 0)
    attrs = {**window_attrs(pads=pads, **windows), "group": groups if groups != 1 else None}
    if not is_integer:
        return e.Conv(x, w, bias, **attrs)
    assert e.node is not None
    x_value, w_value = e.node.inputs[:2]
    y = integer_conv(e, x, w, (x_value if x is plain else None, w_value), attrs)
    return y if bias is None else e.Add(y, per_channel(e, bias, rank))


@exports("conv_transpose")
def conv_transpose(
    e: Scope, x: Ref, w: Ref, bias: Ref | None, output_padding: Ints, groups: int, **windows: Any
) -> Ref:
    attrs = static_windows(e, "ConvTranspose", windows)
    attrs["output_padding"] = listed(output_padding, 0)
    return e.ConvTranspose(x, w, bias, **attrs, group=groups if groups != 1 else None)


@exports("deform_conv")
def deform_conv(
    e: Scope,
    x: Ref,
    w: Ref,
    offset: Ref,
    bias: Ref | None,
    mask: Ref | None,
    groups: int,
    offset_groups: int,
    **windows: Any,
) -> Ref:
    attrs = static_windows(e, "DeformConv", windows)
    shared = {"group": groups, "offset_group": offset_groups}
    if x.rank != 3:
        return e.DeformConv(x, w, offset, bias, mask, **attrs, **shared)
    # runtimes support images: one of height 1, without vertical offsets
    taps = (*offset.shape[:1], offset.shape[1], 1, *offset.shape[2:])
    across = reshape(e, offset, offset.shape, taps)
    both = e.Concat(e.Mul(across, e.scalar(0, across)), across, axis=2)
    rows = (offset.shape[0], 2 * offset.shape[1], 1, offset.shape[2])
    moved = reshape(e, both, (*taps[:2], 2, taps[3]), rows)
    before, after = windows["pads"] or (0, 0)
    attrs = {
        "strides": [1, *(windows["strides"] or [1])],
        "pads": [0, before, 0, after],
        "dilations": [1, *(windows["dilations"] or [1])],
    }
    image, filters = unsqueeze(e, x, 2), unsqueeze(e, w, 2)
    mask = None if mask is None else unsqueeze(e, mask, 2)
    return squeeze(e, e.DeformConv(image, filters, moved, bias, mask, **attrs, **shared), 2)


@exports("col2im")
def col2im(e: Scope, x: Ref, image_shape: Shape, block_shape: Ints, **windows: Any) -> Ref:
    attrs = static_windows(e, "Col2Im", windows)
    return e.Col2Im(x, sizes_tensor(e, image_shape), e.ints(list(block_shape or ())), **attrs)


# regions and resampling


@exports("roi_align", widens=False)
def roi_align(
    e: Scope, x: Ref, rois: Ref, batch_indices: Ref, coordinate_mode: str, **attrs: Any
) -> Ref:
    """RoiAlign; before opset 16 there is one coordinate mode and no attribute for it."""
    if coordinate_mode == "half_pixel":
        e.needs(16, "ONNX RoiAlign has no coordinates 'half_pixel' before")
    mode = coordinate_mode if e.opset >= 16 else None
    return e.RoiAlign(x, rois, batch_indices, coordinate_transformation_mode=mode, **attrs)


@exports("max_roi_pool")
def max_roi_pool(e: Scope, x: Ref, rois: Ref, pooled_shape: Ints, spatial_scale: float) -> Ref:
    return e.MaxRoiPool(x, rois, pooled_shape=list(pooled_shape or ()), spatial_scale=spatial_scale)


@exports("grid_sample")
def grid_sample(
    e: Scope, x: Ref, grid: Ref, mode: str, padding_mode: str, align_corners: bool
) -> Ref:
    """GridSample; opset 16 supports only images and has other mode names."""
    if x.rank != 4:
        e.needs(20, f"ONNX GridSample takes no tensor of rank {x.rank} before")
    if e.opset < 20:
        mode = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
    return e.GridSample(x, grid, mode=mode, padding_mode=padding_mode, align_corners=align_corners)


@exports("resize")
def resize(
    e: Scope,
    x: Ref,
    sizes_data: Ref | None,
    scales_data: Ref | None,
    roi_data: Ref | None,
    sizes: Sizes,
    scales: Sequence[float] | None,
    roi: Sequence[float] | None,
    mode: str,
    coordinate_mode: str,
    nearest_mode: str,
    cubic_coeff_a: float,
    exclude_outside: bool,
    extrapolation_value: float,
    antialias: bool,
) -> Ref:
    if coordinate_mode == "half_pixel_symmetric":
        e.needs(19, "ONNX Resize has no coordinates 'half_pixel_symmetric' before")
    region = roi_data
    if region is None and roi is not None:
        region = e.constant(np.asarray(roi, np.float32))
    attrs = {
        "mode": mode,
        "coordinate_transformation_mode": coordinate_mode,
        "nearest_mode": nearest_mode if mode == "nearest" else None,
        "cubic_coeff_a": cubic_coeff_a if mode == "cubic" else None,
        "exclude_outside": 1 if exclude_outside else None,
        "extrapolation_value": extrapolation_value or None,
        "antialias": 1 if antialias else None,
    }
    if scales_data is None and sizes_data is None and scales is not None:
        scales_data = e.constant(np.asarray(scales, np.float32))
    if scales_data is not None:
        return e.Resize(x, region, scales_data, **attrs)
    target = sizes_tensor(e, sizes or ()) if sizes_data is None else sizes_data
    return e.Resize(x, region, None, target, **attrs)
