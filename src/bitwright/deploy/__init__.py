"""Predictions of what other runtimes do with a model file, and repairs."""
