"""Loads the emitted runtime and exposes its functions to Python.

The object cache holds its code under the name `runtime`, so a warm start emits nothing.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from bitwright.backends.cpu.codegen import jit
from bitwright.target import host


def _text() -> str:
    from bitwright.backends.cpu.runtime.emitted import runtime_text  # slow to import

    return runtime_text(host())


class Runtime:
    """The runtime's functions; calls release the GIL."""

    def __init__(self) -> None:
        self._library = jit.load_named("runtime", _text, host())
        address, number = ctypes.c_void_p, ctypes.c_int64
        self.run = self._function("run", None, address, number)
        self.work = self._function("work", None, address, number)
        self.take_part = self._function("take_part", None, address, number)
        self.start = self._function("start", number, address, address, number)
        self.stop = self._function("stop", None, address)
        self.idle = self._function("idle", None, address, number)
        self.nothing = self._library.address("nothing")

    def _function(self, name: str, result: Any, *params: Any) -> Any:
        return ctypes.CFUNCTYPE(result, *params)(self._library.address(name))


@cache
def runtime() -> Runtime:
    """The runtime of the process."""
    return Runtime()
