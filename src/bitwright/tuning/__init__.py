"""Where the error of a quantized model comes from, and what would reduce it."""
