"""Object code on disk: a warm start loads machine code and never runs LLVM.

An entry is one file, named by a hash of everything that decides its content (IR text, target,
versions). It carries a checksum: an entry that is truncated, corrupt or not ours is compiled again
and replaced. Files appear by renaming, so a reader sees a whole entry or none, with any number of
processes at work. A folder that cannot be written serves readers; one that cannot be read is as
good as none. Beyond its size bound the cache drops what was used least recently.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import llvmlite  # type: ignore[import-untyped]

from bitwright import knobs, system
from bitwright.target import Target

VERSION = 2
"""Part of every key; raise it when the same text is compiled otherwise (passes, convention)."""
_TOUCH_AFTER = 3600
"""An entry's time of use is renewed at most this often, in seconds, to spare writes."""

_held: dict[Path, int] = {}
"""Bytes that lay in a folder when it was looked through, and what this process added."""

Compiler = Callable[[str, Target], bytes]


# a release of llvmlite has one LLVM inside
_VERSIONS = f"bitwright {VERSION}, llvmlite {llvmlite.__version__}"


class ObjectCache:
    """A folder of entries, or nothing at all where `folder` is None."""

    def __init__(self, folder: Path | None, limit: int = 1 << 30) -> None:
        self.folder, self.limit = folder, limit

    def get_all(
        self,
        texts: Sequence[str],
        target: Target,
        compiler: Callable[[Sequence[str], Target], Sequence[bytes]],
    ) -> tuple[bytes, ...]:
        """The object code of several modules; those that the folder lacks are made together."""
        names = {text: key(text, target) for text in texts}
        qvalues: dict[str, bytes | None] = dict.fromkeys(names)
        if self.folder is not None:
            qvalues = {text: self._read(self.folder / name) for text, name in names.items()}
        missing = [text for text, code in qvalues.items() if code is None]
        for text, code in zip(missing, compiler(missing, target) if missing else (), strict=True):
            qvalues[text] = code
            if self.folder is not None:
                self._keep(self.folder / names[text], code)
        return tuple(qvalues[text] or b"" for text in texts)

    def find(self, name: str) -> bytes | None:
        """The entry of this name (`key`), if there is one."""
        return None if self.folder is None else self._read(self.folder / name)

    def keep(self, name: str, code: bytes) -> None:
        """Write the entry of this name, if that can be."""
        if self.folder is not None:
            self._keep(self.folder / name, code)

    def get_named(
        self, name: str, text: Callable[[], str], target: Target, compiler: Compiler
    ) -> bytes:
        """The object code of a module that these sources of bitwright make by this name."""
        named = key(f"{name} of bitwright {system.sources()}", target)
        return self._get(named, lambda: compiler(text(), target))

    def _get(self, name: str, make: Callable[[], bytes]) -> bytes:
        if self.folder is None:
            return make()
        path = self.folder / name
        code = self._read(path)
        if code is None:
            code = make()
            self._keep(path, code)
        return code

    def _keep(self, path: Path, code: bytes) -> None:
        """Write an entry. Looking through the folder takes long, so that is done when it is full.

        What other processes add meanwhile is not counted; the next to look finds it.
        """
        with suppress(OSError):
            system.write_entry(path, code)
            if path.parent in _held:
                _held[path.parent] += len(code)
            if _held.get(path.parent, self.limit + 1) > self.limit:
                self.prune()

    def _read(self, path: Path) -> bytes | None:
        code = system.read_entry(path)
        if code is not None:
            with suppress(OSError):
                self.touch(path, lambda: os.utime(path))
        return code

    def touch(self, path: Path, renew: Callable[[], None]) -> None:
        """Note that an entry was used, if that was not noted of late."""
        if time.time() - path.stat().st_mtime > _TOUCH_AFTER:
            renew()

    def has_room(self, nbytes: int) -> bool:
        """Whether an entry of this size leaves place for others."""
        return nbytes <= self.limit // 2

    def prune(self) -> None:
        """Bring a folder beyond its bound to seven eighths of it, dropping what was used least."""
        entries = []
        assert self.folder is not None
        for entry in os.scandir(self.folder):
            with suppress(OSError):  # another process may have dropped it
                found = entry.stat()
                entries.append((found.st_mtime, found.st_size, entry.path))
        total = sum(size for _, size, _ in entries)
        goal = self.limit if total <= self.limit else self.limit - self.limit // 8
        for _, size, path in sorted(entries):
            if total <= goal:
                break
            with suppress(OSError):
                os.unlink(path)
                total -= size
        _held[self.folder] = total


def key(text: str, target: Target) -> str:
    """The name of an entry: a hash of all that decides its content."""
    parts = (_VERSIONS, target.triple, target.cpu, target.llvm_features, target.abi, text)
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def default_cache() -> ObjectCache:
    """The cache that the knobs describe."""
    folder = system.cache_folder()
    return ObjectCache(folder and folder / "objects", knobs.CACHE_BYTES.number())
