"""Backward kernels as plain functions: arrays in, arrays out.

    dx, dgamma, dbeta = bw.nn.rms_norm_backward(x, gamma, dy, eps=1e-6)

For training loops of one's own. A function compiles a program for each combination of shapes, types
and options and keeps it; it runs the kernels of `bw.grad` and `bw.Trainer`.
"""

from bitwright.nn.activations import (
    elu_backward,
    gelu_backward,
    hard_swish_backward,
    leaky_relu_backward,
    mish_backward,
    quick_gelu_backward,
    relu_backward,
    sigmoid_backward,
    silu_backward,
    softplus_backward,
    tanh_backward,
)
from bitwright.nn.losses import (
    cross_entropy_backward,
    log_softmax_backward,
    softmax_backward,
)
from bitwright.nn.norms import (
    NormGradients,
    batch_norm_backward,
    group_norm_backward,
    layer_norm_backward,
    rms_norm_backward,
)
from bitwright.nn.products import (
    AttentionGradients,
    attention_backward,
    matmul_backward,
)
from bitwright.nn.sequences import (
    cumsum_backward,
    gather_backward,
    rope_backward,
)
from bitwright.nn.windows import (
    ConvGradients,
    avg_pool2d_backward,
    conv2d_backward,
    max_pool2d_backward,
)

__all__ = [
    "AttentionGradients",
    "ConvGradients",
    "NormGradients",
    "attention_backward",
    "avg_pool2d_backward",
    "batch_norm_backward",
    "conv2d_backward",
    "cross_entropy_backward",
    "cumsum_backward",
    "elu_backward",
    "gather_backward",
    "gelu_backward",
    "group_norm_backward",
    "hard_swish_backward",
    "layer_norm_backward",
    "leaky_relu_backward",
    "log_softmax_backward",
    "matmul_backward",
    "max_pool2d_backward",
    "mish_backward",
    "quick_gelu_backward",
    "relu_backward",
    "rms_norm_backward",
    "rope_backward",
    "sigmoid_backward",
    "silu_backward",
    "softmax_backward",
    "softplus_backward",
    "tanh_backward",
]
