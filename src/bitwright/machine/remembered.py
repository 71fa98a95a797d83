"""Measurements of this machine on disk, in the cache folder.

The file's name is a hash of the processor, the target, the number of threads and the version of
bitwright, so a measurement is never used for another of them. A missing, damaged or foreign file
is no measurement. Without a cache folder, measurements last as long as the process.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from bitwright import __version__, system
from bitwright.target import Target

FORMAT = 1
"""Increased when what is measured, or how, changes."""
_IN_PROCESS: dict[tuple[Path | None, str], dict[str, Any]] = {}
"""By file and key, where the file cannot be written."""


def _key(target: Target, threads: int) -> str:
    facts = (
        system.processor(),
        target.name,
        target.cpu,
        sorted(target.features),
        threads,
        __version__,
        FORMAT,
    )
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _file(key: str) -> Path | None:
    folder = system.cache_folder()
    return None if folder is None else folder / f"machine-{key[:32]}"


def read(target: Target, threads: int) -> dict[str, Any]:
    """All measurements for a target and a number of threads, by name; empty if there are none."""
    key = _key(target, threads)
    path = _file(key)
    data = None if path is None else system.read_entry(path)
    if data is None:
        return dict(_IN_PROCESS.get((path, key), {}))
    with suppress(ValueError):
        found = json.loads(data)
        if isinstance(found, dict):
            return found
    return {}


def write(target: Target, threads: int, measured: dict[str, Any]) -> None:
    """Replace measurements of these names; the others stay."""
    key = _key(target, threads)
    path, whole = _file(key), read(target, threads) | measured
    _IN_PROCESS[path, key] = whole
    if path is None:
        return
    with suppress(OSError):
        system.write_entry(path, json.dumps(whole).encode())
        del _IN_PROCESS[path, key]
