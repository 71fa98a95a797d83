"""Matrix products on the tensor cores."""
