"""Sizes that were found to fit together, remembered beside a stored model.

Whether sizes fit together depends on the model alone, and finding out takes every op's inference
rule. So the answer is kept: a process that sees sizes an earlier one has looked at need not look
again. Only good answers are kept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from bitwright import system
from bitwright.ir.graph import Node

if TYPE_CHECKING:  # slow to import, and a warm start with known sizes does not need it
    from bitwright.backends.cpu.runtime.sizes import SizeChecks

Sizes = list[list[str | int]]
KEPT = 64
"""Sets of sizes that are remembered of one model, the latest ones."""


class CachedSizeChecks:
    """Size checks as text, made only when sizes come that were not seen before."""

    def __init__(self, path: Path, digest: str, text: str, places: list[str]) -> None:
        self._path, self._digest, self._text, self._places = path, digest, text, places

    @cached_property
    def _checks(self) -> SizeChecks:
        from bitwright.backends.cpu.runtime.sizes import checks_from_text

        return checks_from_text(self._text, self._places)

    @cached_property
    def _proved(self) -> list[Sizes]:
        data = system.read_entry(self._path)
        with suppress(ValueError, KeyError, TypeError):
            known = json.loads(data or b"{}")
            if known["digest"] == self._digest and isinstance(known["sizes"], list):
                return known["sizes"]
        return []

    def verify(self, bindings: Mapping[str, int]) -> None:
        """Raise a `RunError` if these sizes do not fit together."""
        if not self._places:
            return
        sizes: Sizes = [[name, int(size)] for name, size in sorted(bindings.items())]
        if sizes in self._proved:
            return
        self._checks.verify(bindings)
        self._proved[: max(0, len(self._proved) - KEPT + 1)] = []
        self._proved.append(sizes)
        with suppress(OSError):
            known = {"digest": self._digest, "sizes": self._proved}
            system.write_entry(self._path, json.dumps(known).encode())

    def ready(self, bindings: Mapping[str, int], seen: set[Node]) -> None:
        self._checks.ready(bindings, seen)
