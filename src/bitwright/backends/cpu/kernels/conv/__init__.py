"""Convolutions: selection and emission of kernels."""
