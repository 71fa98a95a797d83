"""The `tokenizers` library, which the extra `[llm]` brings."""

from __future__ import annotations

import importlib
from typing import Any

from bitwright.errors import BitwrightError


def need(module: str, extra: str = "llm") -> Any:
    """An optional module; an error that names the extra if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise BitwrightError(
            f"the package {module.partition('.')[0]!r} is needed and not installed",
            hint=f'Install it with: pip install "bitwright[{extra}]". ({error})',
        ) from None
