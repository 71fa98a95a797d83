"""Block formats: a narrow float type with one narrow scale for each block."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BlockFormat:
    element: str
    block: int
    scale: str


FORMATS = {
    "f8": BlockFormat("f8e4m3fn", 128, "f32"),
    "mxfp4": BlockFormat("f4e2m1", 32, "f8e8m0"),
    "mxfp8": BlockFormat("f8e4m3fn", 32, "f8e8m0"),
    "mxfp8e5m2": BlockFormat("f8e5m2", 32, "f8e8m0"),
    "nvfp4": BlockFormat("f4e2m1", 16, "f8e4m3fn"),
}
