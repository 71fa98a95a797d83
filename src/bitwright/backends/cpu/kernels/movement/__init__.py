"""Ops that move elements: selection and emission of kernels."""
