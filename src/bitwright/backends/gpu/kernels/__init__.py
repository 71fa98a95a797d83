"""Kernel families: one package each; `lower_*.py` choose kernels, the other files write them."""
