"""Masked loads: what they give where the mask is false, in every element type."""

import numpy as np
import pytest
import torch
from on_gpu import check_node

from bitwright.backends.gpu.codegen.loads import masked_load
from bitwright.backends.gpu.codegen.source import Config, KernelSource
from bitwright.backends.gpu.runtime.launch import Kernel
from bitwright.backends.gpu.runtime.tensors import torch_type
from bitwright.ir.dtype import f16, i8, i16, i32, u8

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FILLS = [
    (i8, -128),
    (i8, -1),
    (i8, 127),
    (u8, 128),
    (u8, 255),
    (i16, -300),
    (i32, -7),
    (f16, "-1.5"),
]


@pytest.mark.parametrize("element, fill", FILLS, ids=str)
def test_fill(element, fill):
    load = masked_load("x + i", "i < n", fill, element)
    body = f"i = tl.arange(0, BLOCK)\ntl.store(y + i, {load})"
    config = Config({"BLOCK": 1024}, 1, 1)
    source = KernelSource(
        "fill", body, {"x": element, "y": element}, ("n",), (config,), lambda _: (1,)
    )
    x = torch.arange(1024, device=DEVICE).to(torch_type(element))
    y = torch.zeros_like(x)
    Kernel(source, config).launch({"x": x, "y": y}, {"n": 48})
    assert y[:48].tolist() == x[:48].tolist()
    assert y[48:].tolist() == [float(fill)] * (1024 - 48)


def test_no_mask():
    assert masked_load("x", "", -1, i8) == "tl.load(x)"


@pytest.mark.parametrize("element", [np.int8, np.uint8])
def test_max_pool_of_integers(element):
    limits = np.iinfo(element)
    x = np.random.default_rng(0).integers(limits.min, limits.min + 9, (1, 16, 9, 8)).astype(element)
    check_node("max_pool", x, kernel=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1))
