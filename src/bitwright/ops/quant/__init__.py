"""Quantize, dequantize and integer arithmetic."""
