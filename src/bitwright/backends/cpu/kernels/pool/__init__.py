"""Pooling and resampling: selection and emission of kernels."""
