"""Operators: one declaration each, and the interpreter that runs any graph by reference."""
