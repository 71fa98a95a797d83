"""Limit numpy's BLAS to one thread.

OpenBLAS, which most numpy builds include, keeps its idle threads spinning. They would take cores
from the compiled model.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any


@contextmanager
def products_on_one_thread() -> Iterator[None]:
    """Limit numpy's matrix products to one thread inside this context, if numpy uses OpenBLAS."""
    functions = _openblas()
    if functions is None:
        yield
        return
    get, set_ = functions
    before = get()
    set_(1)
    try:
        yield
    finally:
        set_(before)


@cache
def _openblas() -> tuple[Any, Any] | None:
    """Getter and setter of the number of OpenBLAS threads; None for other libraries."""
    with suppress(ImportError, OSError, AttributeError):
        library = ctypes.CDLL(importlib.import_module("numpy._core._multiarray_umath").__file__)
        for name in ("scipy_openblas_{}_num_threads64_", "openblas_{}_num_threads"):
            if hasattr(library, name.format("set")):
                return getattr(library, name.format("get")), getattr(library, name.format("set"))
    return None
