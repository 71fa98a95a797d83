"""Imports of the standard ONNX operators, one file per family."""
