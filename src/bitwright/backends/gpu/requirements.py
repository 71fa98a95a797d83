"""What the GPU backend needs: torch, triton, a driver and a device; clear errors name what is
missing."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from bitwright.errors import BitwrightError

HINT = "Install it with: pip install 'bitwright[gpu]'"
LOWEST_CAPABILITY = (8, 0)


@cache
def load_torch() -> Any:
    """The module torch."""
    return _load("torch")


@cache
def load_triton() -> Any:
    """The module triton."""
    load_torch()
    return _load("triton")


def _load(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise BitwrightError(
            f"target 'cuda' needs the package {name!r}, which is not installed",
            found=str(error),
            hint=HINT,
        ) from None
