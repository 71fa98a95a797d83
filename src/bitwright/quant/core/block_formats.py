"""Block formats of stored weights (`ops.quant.block_formats`)."""

from __future__ import annotations

from bitwright.ops.quant.block_formats import FORMATS, BlockFormat, Parts, dequantize, format_named

__all__ = ["FORMATS", "BlockFormat", "Parts", "dequantize", "format_named"]
