"""Cyclic shift of elements along axes.

y[..., i, ...] = x[..., (i - shift) mod size, ...]
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.errors import InferenceError
from bitwright.ir.graph import Node
from bitwright.ir.types import TensorType, normalize_axis
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.opdef import Attr, Kind, OpDef, draw, sample
from bitwright.ops.core.reverse import Gradients


def _infer(x: TensorType, shifts: tuple[int, ...], axes: tuple[int, ...]) -> TensorType:
    if len(shifts) != len(axes):
        raise InferenceError("every axis needs one shift", expected=len(axes), found=len(shifts))
    for axis in axes:
        normalize_axis(axis, x.rank)
    return x


def _grad(b: Builder, node: Node, dys: list[Any]) -> Gradients:
    return [b.roll(dys[0], shifts=[-s for s in node.attrs["shifts"]], axes=node.attrs["axes"])]


OPDEFS = [
    OpDef(
        "roll",
        Kind.MOVEMENT,
        "x",
        infer=_infer,
        reference=lambda x, shifts, axes: np.roll(x, shifts, axes),
        samples=lambda: [
            sample(draw(4, 5), shifts=[2], axes=[1]),
            sample(draw(4, 5, dtype="i64"), shifts=[-1, 7], axes=[0, -1]),
            sample(draw(0, 3), shifts=[1], axes=[0]),
            sample(draw(3, dtype="bool"), shifts=[], axes=[]),
        ],
        grad=_grad,
        attrs={"shifts": Attr("ints"), "axes": Attr("ints")},
        doc="x shifted cyclically by `shifts` along `axes`.",
    )
]
