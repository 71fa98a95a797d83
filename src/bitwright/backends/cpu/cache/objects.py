"""The object code cache: a warm start loads machine code and never runs LLVM.

An entry is one file, named by a hash of everything that determines its content (IR text, target,
versions). It has a checksum: an entry that is truncated, corrupt or not trusted is compiled again
and replaced. Files are renamed into place, so concurrent readers see a whole entry or none. A
read-only folder serves readers; an unreadable one counts as empty. Above its size limit, the cache
drops the least recently used entries.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import llvmlite  # type: ignore[import-untyped]

from bitwright import knobs, system
from bitwright.target import Target

VERSION = 2
"""Part of every key. Increase it when the same text compiles to other code."""
_TOUCH_AFTER = 3600
"""The minimum time between updates of an entry's time of use, in seconds."""

_folder_bytes: dict[Path, int] = {}
"""Bytes in a folder at its last scan, plus those that this process added."""

Compiler = Callable[[str, Target], bytes]


# each llvmlite release contains one LLVM version
_VERSIONS = f"bitwright {VERSION}, llvmlite {llvmlite.__version__}"


class ObjectCache:
    """A folder of entries; `folder` None disables the cache."""

    def __init__(self, folder: Path | None, limit: int = 1 << 30) -> None:
        self.folder, self.limit = folder, limit

    def get_all(
        self,
        texts: Sequence[str],
        target: Target,
        compiler: Callable[[Sequence[str], Target], Sequence[bytes]],
    ) -> tuple[bytes, ...]:
        """The object code of several modules; compiles all missing ones in one call."""
        names = {text: key(text, target) for text in texts}
        objects = {text: self.read_entry(name) for text, name in names.items()}
        missing = [text for text, code in objects.items() if code is None]
        for text, code in zip(missing, compiler(missing, target) if missing else (), strict=True):
            objects[text] = code
            self.write_entry(names[text], code)
        return tuple(objects[text] or b"" for text in texts)

    def read_entry(self, name: str) -> bytes | None:
        """The entry of this name (`key`), or None."""
        path = None if self.folder is None else self.folder / name
        code = None if path is None else system.read_entry(path)
        if path is not None and code is not None:
            with suppress(OSError):
                self.touch(path, lambda: os.utime(path))
        return code

    def write_entry(self, name: str, code: bytes) -> None:
        """Write the entry of this name, and prune a full folder; skips an unwritable folder.

        A scan of the folder is slow, so this process counts its own bytes between scans; entries
        of other processes are counted at the next scan.
        """
        if self.folder is None:
            return
        with suppress(OSError):
            system.write_entry(self.folder / name, code)
            if self.folder in _folder_bytes:
                _folder_bytes[self.folder] += len(code)
            if _folder_bytes.get(self.folder, self.limit + 1) > self.limit:
                self.prune()

    def get_named(
        self, name: str, text: Callable[[], str], target: Target, compiler: Compiler
    ) -> bytes:
        """The object code of the module that bitwright's sources generate under this name."""
        named = key(f"{name} of bitwright {system.sources()}", target)
        code = self.read_entry(named)
        if code is None:
            code = compiler(text(), target)
            self.write_entry(named, code)
        return code

    def touch(self, path: Path, renew: Callable[[], None]) -> None:
        """Update an entry's time of use with `renew`, unless that was done recently."""
        if time.time() - path.stat().st_mtime > _TOUCH_AFTER:
            renew()

    def has_room(self, nbytes: int) -> bool:
        """Whether an entry of this size leaves room for others."""
        return nbytes <= self.limit // 2

    def prune(self) -> None:
        """Reduce a folder above its limit to 7/8 of it; drops the least recently used entries."""
        entries = []
        assert self.folder is not None
        for entry in os.scandir(self.folder):
            with suppress(OSError):  # another process may have removed it
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
        _folder_bytes[self.folder] = total


def key(text: str, target: Target) -> str:
    """The name of an entry: a hash of everything that determines its content."""
    facts = (target.triple, target.cpu, target.llvm_features, target.abi)
    return hash_parts((_VERSIONS, *facts, text))


def hash_parts(parts: Iterable[str]) -> str:
    """The SHA-256 of texts and their lengths."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def default_cache() -> ObjectCache:
    """The cache that the knobs configure."""
    folder = system.cache_folder()
    return ObjectCache(folder and folder / "objects", knobs.CACHE_BYTES.number())
