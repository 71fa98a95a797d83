"""The samples that ONNX Runtime 1.31.1 does not run, or runs incorrectly, and why.

A sample is named "op-number"; `NOT_IN_ORT` names ops on element types, as "op type".
"""

from bitwright.export.onnx.mappings.training import TRAINING_OPS

NO_ONNX_FORM = {"conj", "real", "imag", "squared_norm", "complex", "fft"}
NO_ONNX_FORM |= {"cast-11", "cast-12", "matmul-9"}
NO_ONNX_FORM |= {"integer_rnn", "integer_gru", "integer_lstm", "dropout", "range_counts"}
NO_ONNX_FORM |= {"block_matmul", "block_grouped_matmul", "block_gather", "kv_write"}
NO_ONNX_FORM |= {"cached_attention", "f8_matmul", *TRAINING_OPS}
"""No ONNX op computes with complex numbers, quantizes the states of a layer, trains, multiplies
float8 values, or reads blocks of GGUF files and caches of several sequences."""

RANDOM = {"random_uniform", "random_normal", "bernoulli", "multinomial"}
"""Random numbers differ between runtimes; only their type is compared."""

CRASHES_ORT = {"unique-6", "unique-7", "unique-8"}
"""The process dies: unique of nothing."""

DIFFERS_IN_ORT = {
    "conv-6": 13,  # no channels: the result is sometimes not written at all
    "integer_matmul-6": 13,  # no terms: the result is not written at all
    "quantize-5": 21,  # divides f16 in f32, where ONNX rounds the quotient to f16
    "grid_sample-14": 20,  # cubic at the border reads beyond it; ONNX repeats the border
    "grid_sample-15": 20,
    "dynamic_quantize-9": 21,  # the maximum of no rows keeps the axis that it reduces
}
"""The opset at which ONNX's own evaluator gives the right answer instead."""

NO_RUNTIME = {"custom-0", "custom-1"}  # no other runtime has them
NO_RUNTIME |= {"multinomial-1", "multinomial-2"}  # f64, no draws
NO_RUNTIME |= {"rnn-5", "gru-5", "lstm-5", "scan-2"}  # no steps: refused, or ONNX Runtime crashes
NO_RUNTIME |= {"max_pool_indices-7", "max_pool_indices-17"}  # bf16; the evaluator's indices differ
"""Neither ONNX Runtime nor ONNX's evaluator runs these; only the checker judges them."""

_BY_TYPE = {
    "bf16": """
        abs acos acosh add argmax argmin asin asinh atan atanh avg_pool ceil celu conv cos
        cosh cumprod cumsum det div elu eq erf exp expm1 floor ge gelu grid_sample gt
        hard_sigmoid hard_swish hardmax layer_norm le leaky_relu log log1p log_softmax lp_pool
        lt matmul max_pool maximum minimum mish mod mul ne neg pow prelu quick_gelu
        random_normal random_uniform reciprocal reduce_l1 reduce_l2 reduce_log_sum_exp
        reduce_max reduce_mean reduce_min reduce_prod reduce_sum relu resize rms_norm round
        rsqrt scatter_elements selu shrink sigmoid silu sin sinh softmax softplus softsign
        sqrt sub swish tan tanh thresholded_relu top_k trilu trunc where
    """,
    "bool": """
        where
    """,
    "f32": """
        grid_sample
    """,
    "f4e2m1": """
        bitcast cast dequantize quantize
    """,
    "f64": """
        acos acosh asin asinh atan atan2 atanh cosh elu erf gelu hard_sigmoid hard_swish
        hardmax leaky_relu log1p mish selu sinh softplus softsign tan thresholded_relu
    """,
    "f8e4m3fn": """
        bitcast
    """,
    "i32": """
        prelu
    """,
    "i4": """
        bitcast
    """,
    "i8": """
        one_hot
    """,
    "string": """
        pad
    """,
    "u16": """
        shift_left shift_right
    """,
    "u4": """
        bitcast
    """,
    "u64": """
        reduce_min shift_left shift_right top_k
    """,
    "u8": """
        one_hot resize
    """,
}
NOT_IN_ORT = {f"{op} {name}" for name, ops in _BY_TYPE.items() for op in ops.split()}
"""ONNX Runtime has no kernel; ONNX's evaluator runs them."""
