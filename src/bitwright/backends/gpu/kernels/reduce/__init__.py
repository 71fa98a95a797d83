"""Reductions, scans and orderings."""
