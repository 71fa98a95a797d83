"""Quantized tensors: QuantizedTensor, operations on them, Observer, casts, interchange."""
