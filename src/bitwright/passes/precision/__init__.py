"""Passes that choose and apply floating-point precision."""
