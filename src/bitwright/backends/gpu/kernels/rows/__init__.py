"""Norms, softmax and quantization of rows."""
