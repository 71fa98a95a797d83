"""Rewrite rules by topic; each file has a `RULES` list."""
