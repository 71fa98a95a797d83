"""Passes: pure functions from graph to graph, one per file, named as verbs."""
