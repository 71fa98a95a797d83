"""Calibration data: sources (arrays, files, tables, images, loaders) -> batches by input name."""
