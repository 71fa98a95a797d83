"""Recurrent layers: selection and emission of kernels."""
