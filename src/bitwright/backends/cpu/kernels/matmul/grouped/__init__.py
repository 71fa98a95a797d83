"""Products of rows that are sorted by expert, with the weights of their expert."""
