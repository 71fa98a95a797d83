"""Arithmetic, comparison, reduction, matrix products, casts."""
