"""Kernels by name: of programs that exist, from the cache, else compiled and put there.

A kernel's name is a digest of all that shapes its text, given the target and bitwright's sources,
so a warm start asks by name and writes no text. The cache has two entries for a kernel:

    by name, target and sources     the kernel's slots, and the name of the other entry
    by the text                     object code

so that other sources which write the same text find the object code still.
"""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from bitwright import system
from bitwright.backends.cpu.cache.objects import default_cache, key
from bitwright.backends.cpu.codegen.compilers import hold_workers, submit
from bitwright.backends.cpu.codegen.signature import Signature, Slot
from bitwright.backends.cpu.lowering.artifact import KernelCode
from bitwright.target import Target, host

_ALIVE: WeakValueDictionary[tuple[Target, str], KernelCode] = WeakValueDictionary()
"""Kernels of programs that exist, and those that are being compiled."""
EARLY = 2
"""Workers that start where the cache is empty; more follow where there are cores for them."""
_ANY = "any"
"""The name of an entry that stands for all others."""


class KernelStore:
    """The kernels for one target."""

    def __init__(self, target: Target) -> None:
        self.target, self._cache = target, default_cache()

    def find(self, name: str) -> KernelCode | None:
        """The kernel of this name, if it exists or existed."""
        made = _ALIVE.get((self.target, name))
        return made if made is not None else self._cached(name)

    def make(self, name: str, signature: Signature, text: str) -> KernelCode:
        """The kernel of this text, which is compiled meanwhile if its code was never made."""
        entry = key(text, self.target)

        def note() -> None:
            slots = [[slot.name, slot.kind] for slot in signature.slots]
            data = json.dumps({"slots": slots, "code": entry}).encode()
            self._cache.keep(self._entry(name), data)
            if not self.is_used:
                self._cache.keep(self._entry(_ANY), b"{}")

        def keep(code: bytes) -> None:
            self._cache.keep(entry, code)
            note()

        code = self._cache.find(entry)
        if code is not None:
            note()
        return self._alive(KernelCode(name, signature, code or submit(text, self.target, keep)))

    @property
    def is_used(self) -> bool:
        """Whether the cache holds any kernel that these sources made."""
        return self.noted(_ANY) is not None

    def noted(self, name: str) -> dict[str, Any] | None:
        """What the cache holds by the name: the slots, and which entry is the code."""
        data = self._cache.find(self._entry(name))
        with suppress(ValueError):
            found = json.loads(data or b"null")
            return found if isinstance(found, dict) else None
        return None

    def _entry(self, name: str) -> str:
        return key(f"kernel {name} of {_origin(self.target)}", self.target)

    def _cached(self, name: str) -> KernelCode | None:
        noted = self.noted(name)
        code = self._cache.find(noted["code"]) if noted is not None else None
        if not noted or not code:
            return None
        slots = Signature.of(Slot(*slot) for slot in noted["slots"])
        return self._alive(KernelCode(name, slots, code))

    def _alive(self, kernel: KernelCode) -> KernelCode:
        _ALIVE[self.target, kernel.name] = kernel
        return kernel


def workers_at_hand() -> AbstractContextManager[None]:
    """`hold_workers`; where no kernel is in the cache yet, some are started before any is asked
    for, since that takes as long as loading a model."""
    return hold_workers(0 if KernelStore(host()).is_used else EARLY)


@cache
def _origin(target: Target) -> str:
    """What makes texts of names: these sources, with these facts about the target."""
    facts = replace(target, features=frozenset()), sorted(target.features)  # a set has no order
    versions = f"python {sys.version_info[:2]}, numpy {np.__version__}"
    return f"bitwright {system.sources()}, {versions}, {facts}"
