"""Rewrite rules, grouped by what they know; each file gives a `RULES` list."""
