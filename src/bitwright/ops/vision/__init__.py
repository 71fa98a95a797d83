"""Resizing, sampling, regions of interest, detection."""
