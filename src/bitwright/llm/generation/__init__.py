"""Text from a model: sampling, constraints, stop strings, speculation, and many prompts at once."""
