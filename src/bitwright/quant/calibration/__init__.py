"""Statistics of the values of a model over data."""
