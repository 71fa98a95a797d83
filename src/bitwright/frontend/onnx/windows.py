"""Strides, dilations and explicit padding of window ops, from `auto_pad` too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bitwright.errors import ImportModelError
from bitwright.frontend.onnx.node import OnnxNode
from bitwright.ir import Size
from bitwright.ir.dim import max_size

_AUTO_PADS = ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER")


def window_attrs(node: OnnxNode, sizes: Sequence[Size], kernel: Sequence[int]) -> dict[str, Any]:
    """Strides, dilations and pads of a node, with `auto_pad` resolved for these sizes."""
    rank = len(sizes)
    strides = _per_axis(node, "strides", rank, 1)
    dilations = _per_axis(node, "dilations", rank, 1)
    auto_pad = auto_pad_of(node)
    if auto_pad == "NOTSET":
        pads: list[Size] = _per_axis(node, "pads", 2 * rank, 0)
    elif auto_pad == "VALID":
        pads = [0] * (2 * rank)
    else:
        pads = _same_pads(sizes, kernel, strides, dilations, auto_pad == "SAME_UPPER")
    return {"strides": tuple(strides), "dilations": tuple(dilations), "pads": tuple(pads)}


def auto_pad_of(node: OnnxNode) -> str:
    auto_pad = node.text("auto_pad", "NOTSET") or "NOTSET"
    if auto_pad not in _AUTO_PADS:
        raise ImportModelError(
            "has an unknown auto_pad",
            where=node.where,
            expected=", ".join(_AUTO_PADS),
            found=auto_pad,
        )
    return auto_pad


def split_padding(totals: Sequence[Size], more_at_end: bool) -> list[Size]:
    """Total padding of each axis as begins, then ends; the odd element goes to one side."""
    smaller = [total // 2 for total in totals]
    larger = [total - half for total, half in zip(totals, smaller, strict=True)]
    return [*smaller, *larger] if more_at_end else [*larger, *smaller]


def _same_pads(
    sizes: Sequence[Size],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    upper: bool,
) -> list[Size]:
    """The padding that gives ceil(size / stride) windows."""
    totals: list[Size] = []
    for size, taps, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True):
        extent = (taps - 1) * dilation + 1
        count = (size + stride - 1) // stride
        totals.append(max_size((count - 1) * stride + extent - size, 0))
    return split_padding(totals, upper)


def _per_axis(node: OnnxNode, name: str, count: int, default: int) -> list[Any]:
    values = node.items(name) or [default] * count
    if len(values) != count:
        raise ImportModelError(
            f"attribute {name!r} has the wrong length",
            where=node.where,
            expected=count,
            found=len(values),
        )
    return list(values)


def kernel_of(node: OnnxNode, rank: int, default: Sequence[int] | None = None) -> tuple[int, ...]:
    kernel = node.items("kernel_shape", default)
    if kernel is None or len(kernel) != rank:
        raise ImportModelError(
            "kernel_shape does not fit the operand",
            where=node.where,
            expected=f"{rank} sizes",
            found=kernel,
        )
    return tuple(kernel)
