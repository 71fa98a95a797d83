"""Algorithms that choose codes: scales, rounding, smoothing, bias correction."""
