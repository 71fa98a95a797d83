"""Exports graphs to ONNX files."""

from bitwright.export.onnx import export_onnx

__all__ = ["export_onnx"]
