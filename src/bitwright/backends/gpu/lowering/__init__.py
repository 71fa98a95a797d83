"""Lowering: kernels for nodes, operands of fused regions, passes."""
