"""Device memory, launches, CUDA graphs and programs."""
