"""Quantization of whole models."""
