"""Layers of neural networks: activations, norms, convolutions, pools, attention, recurrence, losses."""
