"""Products of few rows, which are bound by the bytes of the weights."""
