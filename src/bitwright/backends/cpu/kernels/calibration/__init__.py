"""Kernels used by quantization."""
