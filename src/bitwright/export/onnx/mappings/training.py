"""Ops of gradients and training steps, which ONNX does not have."""

from bitwright.export.onnx.mapping import no_form

TRAINING_OPS = (
    "adam_update", "attention_backward", "avg_pool_backward", "batch_norm_backward",
    "batch_norm_train", "channel_moments", "channel_sums", "cofactors", "conv_backward_input",
    "conv_backward_weight", "cross_entropy_backward", "fake_binarize", "fake_dynamic_quantize",
    "gather_backward", "grid_sample_backward", "grid_sample_slopes", "group_norm_backward",
    "grouped_matmul_backward_weight", "gru_backward", "gru_train", "layer_norm_backward",
    "lion_update", "log_softmax_backward", "lstm_backward", "lstm_train", "max_pool_backward",
    "max_roi_pool_backward", "optimization_barrier", "resize_backward", "rms_norm_backward",
    "rnn_backward", "roi_align_backward", "sgd_update", "softmax_backward",
)  # fmt: skip

no_form(
    *TRAINING_OPS,
    reason="ONNX has no ops for gradients and training steps; save the trained model instead",
)
no_form("range_counts", reason="ONNX has no op that counts values between edges")
