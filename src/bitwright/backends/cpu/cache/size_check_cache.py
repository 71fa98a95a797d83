"""A cache of sizes that passed the size checks, in a file next to a cached model.

The result of the checks depends on the model alone, and the checks import every op's inference
rule. A process therefore skips sizes that an earlier one has checked. Only passed checks are
cached.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitwright import system
from bitwright.ir.graph import Node

if TYPE_CHECKING:  # slow to import, and a warm start with known sizes does not need it
    from bitwright.backends.cpu.runtime.sizes import SizeChecks

Sizes = list[list[str | int]]
MAX_SETS = 64
"""The number of cached sets of sizes per model; the oldest are dropped."""
MAX_KNOWN = 1 << 14
"""The number of sets of sizes that a process remembers per model."""


class CachedSizeChecks:
    """Size checks as text; parsed only for sizes that are not in the cache."""

    def __init__(self, path: Path, digest: str, text: str, locations: list[str]) -> None:
        self._path, self._digest, self._text, self._locations = path, digest, text, locations
        self._added = 0
        """Sets of sizes that this process checked; the file gets them when they have doubled."""

    @cached_property
    def _checks(self) -> SizeChecks:
        from bitwright.backends.cpu.runtime.sizes import checks_from_text

        return checks_from_text(self._text, self._locations)

    @cached_property
    def _passed(self) -> list[Sizes]:
        data = system.read_entry(self._path)
        with suppress(ValueError, KeyError, TypeError):
            known = json.loads(data or b"{}")
            if known["digest"] == self._digest and isinstance(known["sizes"], list):
                return known["sizes"]
        return []

    @cached_property
    def _known(self) -> set[Any]:
        """The same sets as keys."""
        return {tuple((name, size) for name, size in sizes) for sizes in self._passed}

    def verify(self, bindings: Mapping[str, int]) -> None:
        """Raise a `RunError` if these sizes are inconsistent."""
        if not self._locations:
            return
        key = tuple((name, int(size)) for name, size in sorted(bindings.items()))
        if key in self._known:
            return
        self._checks.verify(bindings)
        self._passed[: max(0, len(self._passed) - MAX_SETS + 1)] = []
        self._passed.append([[name, int(size)] for name, size in key])
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        self._known.add(key)
        self._added += 1
        if self._added & (self._added - 1):
            return  # a file for every length would take longer than the checks
        with suppress(OSError):
            known = {"digest": self._digest, "sizes": self._passed}
            system.write_entry(self._path, json.dumps(known).encode())

    def ready(self, bindings: Mapping[str, int], seen: set[Node]) -> None:
        self._checks.ready(bindings, seen)
