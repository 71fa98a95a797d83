"""Kernels and compiled models on disk."""
