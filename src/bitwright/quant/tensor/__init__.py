"""Quantization of arrays without a graph."""
