"""Differentiation: the gradient of a graph is a graph."""
