"""Attention and rotary embeddings: selection and emission of kernels."""
