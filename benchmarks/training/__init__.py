"""Data and PyTorch modules of the training benchmarks."""
