"""A row of the table: a model in a package, its description and its inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from models.draw import Array

Size = tuple[int, ...]
Feed = Callable[..., dict[str, Array]]
F32_LIMIT = 1e-4
EIGHT_BITS = "int8: a sum near a rounding boundary may change by a whole quantization step"
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
    """The largest error relative to the output's magnitude; above 1e-4 only with a `why`."""
    why: str = ""
    no_export: str = ""
    """Why the graph cannot be exported to ONNX, if so."""
