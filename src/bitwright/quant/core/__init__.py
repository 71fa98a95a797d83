"""Quantize and dequantize arrays: formats, scales, packing, measurement."""
