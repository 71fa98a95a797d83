"""Language models: architectures as declarations, and their graphs."""
