"""Runs compiled models: programs, memory, step tables, threads."""
