"""Imports of the com.microsoft operators, one file per family."""
