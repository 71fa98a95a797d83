"""Layers of com.microsoft with a state, against ONNX Runtime."""

import numpy as np
import pytest
from one_node import compare, model

from bitwright.errors import UnsupportedError
from bitwright.frontend.onnx import load

DYNAMIC = pytest.mark.parametrize(
    "dynamic", [None, {2: "batch", 5: "length"}], ids=["static", "symbolic"]
)


def draw(*shape, seed=0):
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


@DYNAMIC
@pytest.mark.parametrize(
    "operands, attrs",
    [
        ([draw(2, 3, 5), draw(3, 1, 4), draw(3)], {}),
        ([draw(2, 3, 5), draw(3, 1, 4), draw(3), draw(2, 3, 3)], {"activation": "silu"}),
        ([draw(2, 3, 5), draw(3, 1, 3), None, draw(2, 3, 4)], {"dilation": 2}),
    ],
)
def test_causal_conv(operands, attrs, dynamic):
    compare("CausalConvWithState", operands, 2, dynamic=dynamic, **attrs)


QUERY, KEY, VALUE = draw(2, 5, 12), draw(2, 5, 12, seed=1) * np.float32(0.3), draw(2, 5, 18)
DECAY, RATE, STATE = -np.abs(draw(2, 5, 3)), np.abs(np.tanh(draw(2, 5, 3))), draw(2, 3, 4, 6)
HEADS = {"q_num_heads": 3, "kv_num_heads": 3}


@DYNAMIC
@pytest.mark.parametrize(
    "operands, attrs",
    [
        ([QUERY, KEY, VALUE, None, DECAY, RATE], {}),
        ([QUERY, KEY, VALUE, STATE, DECAY, RATE], {"scale": 0.7}),
        ([QUERY, KEY, VALUE, STATE, None, RATE[:, :, :1].copy()], {"update_rule": "delta"}),
    ],
)
def test_linear_attention(operands, attrs, dynamic):
    compare("LinearAttention", operands, 2, dynamic=dynamic, **HEADS, **attrs)


@pytest.mark.parametrize("attrs", [{"update_rule": "linear"}, {"state_window": 2}])
def test_linear_attention_refuses(attrs):
    with pytest.raises(UnsupportedError, match="LinearAttention"):
        load(model("LinearAttention", [QUERY, KEY, VALUE, None, DECAY, RATE], **HEADS, **attrs))
