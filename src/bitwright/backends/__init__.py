"""Backends: one folder or module per kind of machine."""
