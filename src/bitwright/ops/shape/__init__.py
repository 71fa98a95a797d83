"""Ops that move, select and index elements."""
