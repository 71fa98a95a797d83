"""Normalizations along rows and channels: selection and emission of kernels."""
