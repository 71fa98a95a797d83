"""Reductions, orderings and scans: selection and emission of kernels."""
