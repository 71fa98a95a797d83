"""Tensors of more than 2**31 elements, which 32-bit offsets do not reach; only where a GPU is."""

import numpy as np
import pytest
import torch
from on_gpu import compiled

import bitwright as bw

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ENOUGH = 24 << 30
"""Bytes of device memory."""


@pytest.fixture(autouse=True)
def room():
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < ENOUGH:
        pytest.skip("the GPU has too little free memory")
    yield
    torch.cuda.empty_cache()


def run(graph, **feeds):
    with torch.inference_mode():
        return compiled(graph).run(feeds)["y"]


def pattern(*shape):
    """Random bytes."""
    torch.manual_seed(0)
    return torch.randint(-50, 63, shape, device="cuda", dtype=torch.int8)


def test_elementwise():
    b = bw.Builder("g")
    x = b.input("x", "i8[n]")
    given = pattern((1 << 31) + 77)
    found = run(b.build(y=b.maximum(b.neg(x), np.int8(3))), x=given)
    assert torch.equal(found[-200:], torch.clamp(-given[-200:], min=3))
    assert torch.equal(found[: 1 << 20], torch.clamp(-given[: 1 << 20], min=3))


def test_transposed_copy_and_sums_of_rows():
    b = bw.Builder("g")
    x = b.input("x", "i8[n, m]")
    rows, columns = (1 << 16) + 3, 1 << 15
    given = pattern(rows, columns)
    y = b.reduce_sum(b.cast(b.transpose(x, perm=(1, 0)), to="i32"), axes=(0,))
    found = run(b.build(y=y), x=given).reshape(-1)
    for at in (0, 5, rows - 1):
        assert int(found[at]) == int(given[at].to(torch.int32).sum())


def test_gather_from_a_large_table():
    b = bw.Builder("g")
    table, i = b.input("t", "i8[n, 1024]"), b.input("i", "i64[k]")
    given = pattern((1 << 21) + 5, 1024)
    at = torch.tensor([0, 77, 1 << 20, (1 << 21) + 4], device="cuda")
    assert torch.equal(run(b.build(y=b.gather(table, i)), t=given, i=at), given[at])


def test_product():
    rows, columns, depth = (1 << 16) + 7, 1 << 15, 32
    b = bw.Builder("g")
    w = np.random.default_rng(0).integers(-9, 9, (depth, columns)).astype(np.int8)
    y = b.integer_matmul(b.input("x", f"i8[n, {depth}]"), b.constant(w), None, None, None)
    y = b.requantize(b.mul(b.cast(y, to="f32"), np.float32(0.01)), to="i8")
    given = pattern(rows, depth)
    found = run(b.build(y=y), x=given)
    for at in (0, 1 << 16, rows - 1):
        sums = given[at].double() @ torch.from_numpy(w).cuda().double()
        want = (sums.float() * np.float32(0.01)).round().clamp(-128, 127)
        assert torch.equal(found[at].float(), want)


def test_convolution():
    size, channels, filters = 2048, 16, 64
    b = bw.Builder("g")
    w = np.random.default_rng(0).integers(-9, 9, (filters, channels, 3, 3)).astype(np.int8)
    x = b.input("x", f"i8[n, {channels}, {size}, {size}]")
    y = b.integer_conv(x, b.constant(w), None, None, None, pads=(1, 1, 1, 1))
    y = b.requantize(b.mul(b.cast(y, to="f32"), np.float32(0.01)), to="i8")
    given = pattern(9, channels, size, size)
    found = run(b.build(y=y), x=given)
    part = given[-1:, :, -64:].double()
    want = torch.nn.functional.conv2d(part, torch.from_numpy(w).cuda().double(), padding=1)
    want = (want.float() * np.float32(0.01)).round().clamp(-128, 127)
    assert torch.equal(found[-1:, :, -63:].float(), want[:, :, 1:])
