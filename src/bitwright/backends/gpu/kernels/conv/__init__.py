"""Convolutions in NHWC as implicit matrix products, and depthwise convolutions."""
