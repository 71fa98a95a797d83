"""The names that every mapping of an ONNX op uses."""

from bitwright.frontend.onnx.context import Context, Inputs
from bitwright.frontend.onnx.node import OnnxNode
from bitwright.frontend.onnx.registry import Results, UnmappedError, imports

__all__ = ["Context", "Inputs", "OnnxNode", "Results", "UnmappedError", "imports"]
