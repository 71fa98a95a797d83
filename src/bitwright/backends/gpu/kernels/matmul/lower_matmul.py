"""Products of floats, of float8, and of integers of at most 8 bits without zero points."""

from __future__ import annotations

from bitwright.backends.gpu.kernels.matmul.forms import launch_product
from bitwright.backends.gpu.kernels.matmul.operands import constant_matrix, matrices_of
from bitwright.backends.gpu.kernels.matmul.zero_points import corrections
from bitwright.backends.gpu.lowering.context import (
    GpuLowering,
    NoKernelError,
    RegionView,
    lowers,
)
from bitwright.backends.gpu.lowering.operands import Tail
from bitwright.ir.dtype import bf16, f16, f32, f64, i4, i8, u4, u8
from bitwright.ir.graph import Node

FLOATS = (f64, f32, f16, bf16)
INTEGERS = (i8, u8, i4, u4)


@lowers("f8_matmul")
def lower_f8_matmul(ctx: GpuLowering, node: Node, region: RegionView) -> None:
    """Sums of float8 products in f32; see `product` for the precision of partial sums."""
    anchor = region.anchor
    assert anchor is not None
    x, w = (region.outer(value) for value in anchor.operands)
    matrices = matrices_of(ctx, x, w, constant_matrix(w), node.name)
    tail = Tail.of_region(ctx, node, region)
    launch_product(ctx, node, matrices, tail, why=f"{x.dtype} on tensor cores")


@lowers("matmul")
def lower_matmul(ctx: GpuLowering, node: Node, region: RegionView) -> None:
    anchor = region.anchor
    assert anchor is not None
    x, w = (region.outer(value) for value in anchor.operands)
    is_integer = x.dtype in INTEGERS and w.dtype in INTEGERS
    if not is_integer and not (x.dtype in FLOATS and w.dtype in FLOATS):
        raise NoKernelError(f"there is no product of {x.dtype} and {w.dtype}")
    weight = constant_matrix(w)
    if is_integer:
        weight = None  # its signs are those of the operands, see `zero_points`
    matrices = matrices_of(ctx, x, w, weight, node.name)
    finish = corrections(matrices) if is_integer else None
    tail = Tail.of_region(ctx, node, region)
    launch_product(ctx, node, matrices, tail, finish, why=f"{x.dtype} on tensor cores")
