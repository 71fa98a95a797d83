"""Algorithms for quantized weights: scales, rounding, smoothing, bias correction."""
