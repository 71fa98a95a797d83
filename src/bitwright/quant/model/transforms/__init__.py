"""Rewrites of the float graph before and after quantization."""
