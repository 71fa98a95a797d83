"""Emission of kernels: what models are made of, one file per family of loops."""
