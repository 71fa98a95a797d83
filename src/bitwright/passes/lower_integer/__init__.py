"""Passes that lower Q/DQ graphs to integer operators."""
