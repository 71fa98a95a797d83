"""Where the error of a quantized model comes from, and the search for precisions."""
