"""Elementwise regions, casts, fills and copies between views."""
