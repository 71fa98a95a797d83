"""Compiles kernels of attention and rows for GPUs that are not there; prints reports as JSON."""

import numpy as np
from static_products import AMPERE, HOPPER, print_reports

import bitwright as bw


def attention(element, queries):
    b = bw.Builder("attention")
    lengths = {"q": queries, "k": 256, "v": 256}
    operands = [b.input(name, f"{element}[1, 2, {n}, 64]") for name, n in lengths.items()]
    return b.build(y=b.attention(*operands))


def norm():
    b = bw.Builder("norm")
    x, weight = b.input("x", "f32[64, 768]"), np.ones(768, np.float32)
    y = b.layer_norm(x, weight, weight)
    q, scale, _ = b.dynamic_quantize(y, to="f8e4m3fn", per_token=True)
    return b.build(y=y, q=q, scale=scale)


def first_node_gather():
    """Sizes of 1, and a node whose number is 1: Triton makes constants of them."""
    b = bw.Builder("gather")
    y = b.gather(b.input("x", "f32[100, 32]"), b.input("i", "i64[1]"))
    return b.build(y=b.reduce_mean(b.layer_norm(y, np.ones(32, np.float32)), axes=(0,)))


CASES = {
    "flash on sm_80": (attention("f16", 256), AMPERE),
    "flash on sm_90": (attention("bf16", 256), HOPPER),
    "decode on sm_90": (attention("bf16", 1), HOPPER),
    "norm on sm_90": (norm(), HOPPER),
    "ones on sm_90": (first_node_gather(), HOPPER),
}

if __name__ == "__main__":
    print_reports(CASES)
