"""numpy's products of matrices on one thread.

The threads of OpenBLAS, which most builds of numpy come with, wait for their next product by
spinning, and take the cores from whoever computes in between: here that is the compiled model.
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
    """Within it numpy's products of matrices use one thread, where numpy can be told so."""
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
    """How numpy's OpenBLAS tells and takes its number of threads; None for another library."""
    with suppress(ImportError, OSError, AttributeError):
        library = ctypes.CDLL(importlib.import_module("numpy._core._multiarray_umath").__file__)
        for name in ("scipy_openblas_{}_num_threads64_", "openblas_{}_num_threads"):
            if hasattr(library, name.format("set")):
                return getattr(library, name.format("get")), getattr(library, name.format("set"))
    return None
