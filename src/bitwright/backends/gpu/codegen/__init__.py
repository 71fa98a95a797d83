"""Triton source text: types, scalar forms, expressions, kernels and their loading."""
