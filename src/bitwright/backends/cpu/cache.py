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
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

from bitwright import knobs, system
from bitwright.target import Target

VERSION = 1
"""Part of every key; raise it when the meaning of emitted code changes (calling convention)."""
_MAGIC = b"bwobj\0\1\n"
_DIGEST = 32
_TOUCH_AFTER = 3600
"""An entry's time of use is renewed at most this often, in seconds, to spare writes."""

Compiler = Callable[[str, Target], bytes]


@cache
def _versions() -> str:
    import llvmlite
    import llvmlite.binding as llvm

    return f"bitwright {VERSION}, llvmlite {llvmlite.__version__}, LLVM {llvm.llvm_version_info}"


class ObjectCache:
    """A folder of entries, or nothing at all where `folder` is None."""

    def __init__(self, folder: Path | None, limit: int = 1 << 30) -> None:
        self.folder, self.limit = folder, limit

    def get(self, text: str, target: Target, compiler: Compiler) -> bytes:
        """The object code of a module, from the folder or made by `compiler`."""
        if self.folder is None:
            return compiler(text, target)
        path = self.folder / key(text, target)
        code = self._read(path)
        if code is None:
            code = compiler(text, target)
            with suppress(OSError):
                self._write(path, code)
                self.prune()
        return code

    def _read(self, path: Path) -> bytes | None:
        try:
            data = path.read_bytes()
            start = len(_MAGIC) + _DIGEST
            digest, code = data[len(_MAGIC) : start], data[start:]
            if data[: len(_MAGIC)] != _MAGIC or hashlib.sha256(code).digest() != digest:
                return None
        except OSError:
            return None
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _TOUCH_AFTER:
                os.utime(path)
        return code

    def _write(self, path: Path, code: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_MAGIC + hashlib.sha256(code).digest() + code)
            os.replace(name, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise

    def prune(self) -> None:
        """Drop the entries used least recently until the folder is within its bound."""
        entries = []
        assert self.folder is not None
        for entry in os.scandir(self.folder):
            with suppress(OSError):  # another process may have dropped it
                found = entry.stat()
                entries.append((found.st_mtime, found.st_size, entry.path))
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= self.limit:
                return
            with suppress(OSError):
                os.unlink(path)
                total -= size


def key(text: str, target: Target) -> str:
    """The name of an entry: a hash of all that decides its content."""
    parts = (_versions(), target.triple, target.cpu, target.llvm_features, target.abi, text)
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def default_cache() -> ObjectCache:
    """The cache that the knobs describe."""
    where = knobs.CACHE.get()
    if where in ("", "off"):
        return ObjectCache(None)
    folder = system.cache_folder() / "bitwright" if where == "default" else Path(where)
    return ObjectCache(folder / "objects", int(knobs.CACHE_BYTES.get()))
