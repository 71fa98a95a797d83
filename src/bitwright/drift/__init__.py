"""Drift: counters of clipped and unused range while a quantized model serves."""
