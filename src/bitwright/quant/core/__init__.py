"""Quantized types, parameters and values."""
