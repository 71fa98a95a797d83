"""Normalization along rows and channels: selection and emission of kernels."""
