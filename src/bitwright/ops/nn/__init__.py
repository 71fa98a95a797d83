"""Neural network layers: activations, norms, convolutions, pools, attention, recurrence, losses."""
