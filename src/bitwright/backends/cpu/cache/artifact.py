"""The file format of compiled models. A warm start maps a file and runs no pass and no LLVM.

    64 bytes   magic, SHA-256 of all that follows, length of the index
    index      JSON: the artifact (`serialize`), offsets of objects and arrays, the size checks as
               text, digests of external weight files
    body       object code and packed arrays, each at a 64-byte boundary

A file is written under a temporary name and renamed. A reader accepts it only if its digest is
right; `Digests` caches the digests of large files.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from bitwright import system
from bitwright.backends.cpu.cache.digests import Digests
from bitwright.backends.cpu.cache.objects import hash_parts
from bitwright.backends.cpu.cache.serialize import Decoder, Encoder
from bitwright.backends.cpu.cache.size_check_cache import CachedSizeChecks
from bitwright.backends.cpu.lowering.artifact import CompiledArtifact
from bitwright.ir.dtype import DTYPES, dtype
from bitwright.ir.graph import Graph

MAGIC = b"BWCODE\0\1"
ALIGN = 64
START = len(MAGIC) + 32
"""The offset of the first byte that the digest covers."""
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class CachedArtifact:
    """A compiled model read from a file."""

    interface: Graph
    artifact: CompiledArtifact
    weights: Mapping[str, str]
    """Digests of external weight files, by name."""


def write(path: Path, graph: Graph, artifact: CompiledArtifact, weights: Mapping[str, str]) -> str:
    """Write a file and return its digest; raises `NotSerializable` with the reason."""
    from bitwright.backends.cpu.runtime.sizes import SizeChecks, checks_text

    encoder = Encoder()
    index = encoder.encode(graph, artifact)
    assert isinstance(artifact.checks, SizeChecks)
    index["checks"] = checks_text(artifact.checks)
    index["weights"] = dict(weights)
    parts: list[Any] = [memoryview(item) for item in artifact.objects]
    parts += [np.ascontiguousarray(a).reshape(-1).view(np.uint8).data for a in encoder.arrays]
    ranges, offset = [], 0
    for part in parts:
        ranges.append([offset, len(part)])
        offset += -(-len(part) // ALIGN) * ALIGN
    split = len(artifact.objects)
    index["objects"] = ranges[:split]
    index["arrays"] = [
        [dtype(array.dtype).name, list(array.shape), *range_]
        for array, range_ in zip(encoder.arrays, ranges[split:], strict=True)
    ]
    text = json.dumps(index).encode()
    head = len(text).to_bytes(8, "little") + bytes(ALIGN - START - 8) + text
    head += bytes(-len(text) % ALIGN)
    digest = hashlib.sha256(head)
    pieces = [piece for part in parts for piece in (part, bytes(-len(part) % ALIGN))]

    def fill(file: IO[bytes]) -> None:
        file.write(MAGIC + bytes(32) + head)
        hashing = threading.Thread(target=lambda: list(map(digest.update, pieces)))
        hashing.start()  # in parallel with the writing, which takes as long
        for piece in pieces:
            file.write(piece)
        hashing.join()
        file.seek(len(MAGIC))
        file.write(digest.digest())

    system.write_private(path, fill)
    return digest.hexdigest()


def read(path: Path, digests: Digests) -> CachedArtifact | None:
    """A compiled model; None if the file is missing, truncated, corrupt or not trusted."""
    try:
        with system.open_private(path) as file:
            start = file.read(ALIGN)
            if len(start) < ALIGN or start[: len(MAGIC)] != MAGIC:
                return None
            digest = start[len(MAGIC) : START].hex()
            if digests.of(path, START) != digest:
                return None
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        body = ALIGN + int.from_bytes(start[START : START + 8], "little")
        index = json.loads(bytes(data[ALIGN:body]))
        body += -body % ALIGN
        return _decoded(path, digest, index, data[body:])
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return None


def _decoded(path: Path, digest: str, index: dict[str, Any], body: memoryview) -> CachedArtifact:
    def array(number: int) -> Array:
        name, shape, offset, nbytes = index["arrays"][number]
        if not nbytes:
            return np.empty(shape, DTYPES[name].numpy)
        flat = np.frombuffer(body[offset : offset + nbytes], DTYPES[name].numpy)
        return flat.reshape(shape)

    decoder = Decoder(index, array)
    interface = decoder.interface()
    objects = [bytes(body[offset : offset + nbytes]) for offset, nbytes in index["objects"]]
    checks = CachedSizeChecks(path.with_name(f"{path.name}.sizes"), digest, *index["checks"])
    return CachedArtifact(interface, decoder.decode(interface, objects, checks), index["weights"])


def key(model_digest: str, facts: Sequence[str]) -> str:
    """The name of a model's file: a hash of everything that determines its content."""
    return f"model-{hash_parts((model_digest, *facts))}"


def touch(path: Path, digests: Digests) -> None:
    """Update a file's time of use, and the state for which its digest is cached."""
    digests.update_state(path, START, lambda: os.utime(path))
