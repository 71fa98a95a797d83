"""Elementwise regions and lookup tables: selection and emission of kernels."""
