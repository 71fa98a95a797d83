"""Kernels by name: from live programs, from the cache, or newly compiled.

A kernel's name is a digest of everything that determines its IR, given the target and bitwright's
sources, so a warm start finds it without generating text. The cache has two entries per kernel:

    by name, target and sources     the kernel's slots, and the name of the other entry
    by IR text                      object code

Other sources that generate the same text therefore reuse the object code.
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

_LIVE: WeakValueDictionary[tuple[Target, str], KernelCode] = WeakValueDictionary()
"""Kernels of live programs, and those that are being compiled."""
EARLY = 2
"""Worker processes that start early if the cache is empty; more start on demand."""
_ANY = "any"
"""The name of an entry that exists if any kernel is cached."""


class KernelStore:
    """The kernels for one target."""

    def __init__(self, target: Target) -> None:
        self.target, self._cache = target, default_cache()

    def find(self, name: str) -> KernelCode | None:
        """The kernel of this name, if it is live or cached."""
        live = _LIVE.get((self.target, name))
        return live if live is not None else self._cached(name)

    def make(self, name: str, signature: Signature, text: str) -> KernelCode:
        """The kernel of this text; compiles it in the background if it is not cached."""
        entry = key(text, self.target)

        def write_name() -> None:
            slots = [[slot.name, slot.kind] for slot in signature.slots]
            data = json.dumps({"slots": slots, "code": entry}).encode()
            self._cache.write_entry(self._entry(name), data)
            if not self.is_used:
                self._cache.write_entry(self._entry(_ANY), b"{}")

        def write_code(code: bytes) -> None:
            self._cache.write_entry(entry, code)
            write_name()

        code = self._cache.read_entry(entry)
        if code is not None:
            write_name()
        compiled = code or submit(text, self.target, write_code)
        return self._add_live(KernelCode(name, signature, compiled))

    @property
    def is_used(self) -> bool:
        """Whether the cache has any kernel of these sources."""
        return self.facts(_ANY) is not None

    def facts(self, name: str) -> dict[str, Any] | None:
        """The cached slots of a kernel and the name of its code entry."""
        data = self._cache.read_entry(self._entry(name))
        with suppress(ValueError):
            found = json.loads(data or b"null")
            return found if isinstance(found, dict) else None
        return None

    def _entry(self, name: str) -> str:
        return key(f"kernel {name} of {_origin(self.target)}", self.target)

    def _cached(self, name: str) -> KernelCode | None:
        facts = self.facts(name)
        code = self._cache.read_entry(facts["code"]) if facts is not None else None
        if not facts or not code:
            return None
        slots = Signature.of(Slot(*slot) for slot in facts["slots"])
        return self._add_live(KernelCode(name, slots, code))

    def _add_live(self, kernel: KernelCode) -> KernelCode:
        _LIVE[self.target, kernel.name] = kernel
        return kernel


def compiler_workers() -> AbstractContextManager[None]:
    """`hold_workers`; starts some workers early if the cache is empty, while the model loads."""
    return hold_workers(0 if KernelStore(host()).is_used else EARLY)


@cache
def _origin(target: Target) -> str:
    """Everything that determines the IR of a kernel name: sources, versions, target."""
    # the repr of a set is not stable, so the features are sorted
    facts = replace(target, features=frozenset()), sorted(target.features)
    versions = f"python {sys.version_info[:2]}, numpy {np.__version__}"
    return f"bitwright {system.sources()}, {versions}, {facts}"
