"""Operands of products as matrices: views of [batch..., M, K] and [batch..., K, N].

Constant weights are packed at compile time: K is the last axis, its length padded with zeros to a
multiple of
16 bytes, so that TMA can read them. Several leading axes of x become rows where w is one matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from bitwright.backends.cpu.kernels.matmul.lower_matmul import as_rows, constant_matrix
from bitwright.backends.cpu.lowering.region import broadcast
from bitwright.backends.gpu.kernels.matmul.forms import TMA_BYTES, Matrices
from bitwright.backends.gpu.lowering.context import GpuLowering
from bitwright.ir.graph import Value
from bitwright.ir.types import broadcast_shapes
from bitwright.lir.buffer import View

Array = np.ndarray[Any, Any]


def packed_weight(ctx: GpuLowering, array: Array, name: str) -> View:
    """A constant w[K, N] in memory as [N, K], K padded with zeros; the view is [K, N]."""
    depth, columns = array.shape
    step = max(TMA_BYTES // array.dtype.itemsize, 1)
    padded = np.zeros((columns, -(-depth // step) * step), array.dtype)
    padded[:, :depth] = array.T
    whole = ctx.constant(padded, name)
    return View(whole.buffer, whole.offset, (depth, columns), (1, padded.shape[1]))


def rows_of(ctx: GpuLowering, value: Value) -> View:
    """A value as [rows, K] whose last axis has stride 1; copied where its strides require it."""
    found = as_rows(ctx, ctx.view(value), value.name)
    if found.strides[-1] == 1 or found.shape[-1] == 1:
        return replace(found, strides=(found.strides[0], 1))
    return as_rows(ctx, ctx.contiguous(value), value.name)


def matrices_of(ctx: GpuLowering, x: Value, w: Value, weight: Array | None, name: str) -> Matrices:
    """The operands of a product; `weight` is the constant that takes the place of w."""
    if weight is not None and weight.ndim == 2 and x.rank > 1:
        return Matrices(rows_of(ctx, x), packed_weight(ctx, weight, f"{name}.weight"))
    if w.rank == 2 and x.rank > 1:
        return Matrices(rows_of(ctx, x), ctx.view(w))
    left, right = as_matrix(ctx.view(x)), as_matrix(ctx.view(w))
    if w.rank == 1:  # the result's last axis is that of the rows of x
        left, right = right, _swapped(left)
    batch = broadcast_shapes(left.shape[:-2], right.shape[:-2])
    return Matrices(_expand(left, batch), _expand(right, batch))


def as_matrix(view: View) -> View:
    """A vector as a row."""
    if len(view.shape) > 1:
        return view
    return replace(view, shape=(1, *view.shape), strides=(0, *view.strides))


def _swapped(view: View) -> View:
    axes = range(len(view.shape))
    return view.transpose((*axes[:-2], axes[-1], axes[-2]))


def _expand(view: View, batch: Sequence[object]) -> View:
    return broadcast(view, (*batch, *view.shape[-2:]))  # type: ignore[arg-type]


__all__ = ["constant_matrix", "matrices_of", "packed_weight", "rows_of"]
