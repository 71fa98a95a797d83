"""Boundaries of graphs, control flow, custom and fused ops."""
