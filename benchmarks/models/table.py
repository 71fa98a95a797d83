"""What is compared: a model inside a package, what it is, and what it is fed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from models.draw import Array

Size = tuple[int, ...]
Feed = Callable[..., dict[str, Array]]
F32_LIMIT = 1e-4
EIGHT_BITS = "8 bits: a sum that falls on the other side of a rounding edge moves by a whole step"
HALF = "f16: every operation rounds to 11 bits"


@dataclass(frozen=True)
class Model:
    name: str
    package: str
    member: str
    what: str
    licence: str
    sizes: tuple[Size, ...]
    feed: Feed
    """The inputs of one size: `feed(draw, *size)`."""
    limit: float = F32_LIMIT
    """The largest error relative to the output's scale; above 1e-4 only where `why` says so."""
    why: str = ""
    no_export: str = ""
    """Why ONNX cannot hold the graph again, where that is so."""
