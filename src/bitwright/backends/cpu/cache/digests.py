"""SHA-256 digests of files, cached while the file's state (size, times, inode) is unchanged.

Reading a large file takes as long as the rest of a warm start. The cache folder has one small file
per path. A digest is cached only if the file was last modified a while before it was read: within
the resolution of a file system's clock, a change can leave the state unchanged.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from bitwright import system

SMALL = 1 << 20
"""Files up to this many bytes are always read."""
_QUIET_SECONDS = 2.0
"""The coarsest clock resolution of a file system in use."""


class Digests:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def of(self, path: Path, start: int = 0) -> str:
        """The digest of a file from byte `start`."""
        path = path.resolve()
        before = _state(path)
        if before[0] > SMALL and (known := self._known(path, start, before)) is not None:
            return known
        with open(path, "rb") as file:
            file.seek(start)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        quiet = time.time() - max(before[1:3]) / 1e9 > _QUIET_SECONDS
        if before[0] > SMALL and quiet and _state(path) == before:
            self.remember(path, start, digest)
        return digest

    def remember(self, path: Path, start: int, digest: str) -> None:
        """Cache the digest of a file in its current state."""
        path = path.resolve()
        known = {"path": str(path), "start": start, "state": _state(path), "digest": digest}
        with suppress(OSError):
            system.write_entry(self._file(path), json.dumps(known).encode())

    def update_state(self, path: Path, start: int, change: Callable[[], None]) -> None:
        """Call `change`, which affects a file's times and not its content; keep its digest."""
        path = path.resolve()
        digest = self._known(path, start, _state(path))
        change()
        if digest is not None:
            self.remember(path, start, digest)

    def _known(self, path: Path, start: int, state: list[int]) -> str | None:
        data = system.read_entry(self._file(path))
        with suppress(ValueError, KeyError, TypeError):
            known = json.loads(data or b"{}")
            if [known["path"], known["start"], known["state"]] == [str(path), start, state]:
                return str(known["digest"])
        return None

    def _file(self, path: Path) -> Path:
        return self.folder / f"digest-{hashlib.sha256(os.fsencode(path)).hexdigest()}"


def _state(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev]
