"""Dot products of a register tile, by element type and instruction."""
