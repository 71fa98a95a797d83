"""Adapters: low-rank updates of frozen weights (Hu et al., 2021)."""
