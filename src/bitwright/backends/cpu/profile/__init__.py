"""Measured peaks and times of steps."""
