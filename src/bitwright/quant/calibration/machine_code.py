"""Native functions that bitwright compiles for its own use, called through ctypes.

Calls release the GIL.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from bitwright.backends.cpu.codegen import jit
from bitwright.target import Target, host

_EMITTERS = "bitwright.backends.cpu.kernels.calibration"
ADDRESS, NUMBER, REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


_all: weakref.WeakSet[MachineCode] = weakref.WeakSet()


def _replace_locks_after_fork() -> None:
    """Replace locks in a forked child: a thread that no longer exists may hold them."""
    for code in list(_all):
        code._loading = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_replace_locks_after_fork)


class MachineCode:
    """Functions of one module by name; compiled, or loaded from the cache, at first use.

    The module `emitter` of `_EMITTERS` emits them.
    """

    def __init__(self, name: str, emitter: str, functions: Mapping[str, Sequence[Any]]) -> None:
        self._name, self._emitter, self._kinds = name, emitter, functions
        self._functions: dict[str, Any] = {}
        self._loading = threading.Lock()
        _all.add(self)

    def __getitem__(self, name: str) -> Any:
        if name not in self._functions:
            with self._loading:  # a second library would free the code of the first
                if name not in self._functions:
                    self._load()
        return self._functions[name]

    def _text(self, target: Target) -> str:
        # imported late: emitters are slow to import, and a cached kernel does not need them
        module = importlib.import_module(f"{_EMITTERS}.{self._emitter}")
        return str(getattr(module, f"{self._emitter}_text")(target))

    def _load(self) -> None:
        target = host()
        self._library = jit.load_named(self._name, lambda: self._text(target), target)
        for name, kinds in self._kinds.items():
            address = self._library.address(name)
            self._functions[name] = ctypes.CFUNCTYPE(None, *kinds)(address)
