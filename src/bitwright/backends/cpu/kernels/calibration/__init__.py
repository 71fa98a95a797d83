"""Kernels that quantization calls."""
