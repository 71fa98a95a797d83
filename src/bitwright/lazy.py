"""Package names that are imported on first use, so that importing the package is fast.

__getattr__, __dir__ = lazy_names(__name__, {"load": "bitwright.frontend.load"})
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(
    package: str, home: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The package's `__getattr__` and `__dir__`; `home` maps each name to its module."""

    def find(name: str) -> Any:
        if name not in home:
            return _old_name(package, name)
        if home[name] == package:  # a subpackage
            value = importlib.import_module(f"{package}.{name}")
        else:
            value = getattr(importlib.import_module(home[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*home, *vars(sys.modules[package])})

    return find, names


def _old_name(package: str, name: str) -> Any:
    """What a name of the last release stands for now."""
    if not name.startswith("_"):
        from bitwright.aliases import public_name

        if found := public_name(package, name):
            module, present = found
            return getattr(importlib.import_module(module), present)
    raise AttributeError(f"module {package!r} has no attribute {name!r}")
