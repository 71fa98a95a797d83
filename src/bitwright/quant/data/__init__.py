"""Calibration data from arrays, files and folders."""
