"""Passes that fuse nodes into regions and products."""
