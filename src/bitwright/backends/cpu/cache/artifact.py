"""Compiled models on disk: a warm start maps a file and runs no pass, no lowering and no LLVM.

    64 bytes   magic, SHA-256 of all that follows, length of the index
    index      JSON: the code (`code_text`), where objects and arrays lie, the size checks as text,
               and the files beside the model that it was made from, with their digests
    body       object code and packed arrays, each at a 64-byte boundary

A file is named by a hash of everything that decides its content: the model's bytes, bitwright's
own sources, the packages it uses, the target, the knobs. It is written under another name and
renamed. A reader takes it only if its digest is right; `Digests` remembers the digests of large
files as long as their state (size, times, inode) stays, so that they are not read again.
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
from bitwright.backends.cpu.cache.serialize import Decoder, Encoder
from bitwright.backends.cpu.cache.size_check_cache import CachedSizeChecks
from bitwright.backends.cpu.lowering.artifact import CompiledArtifact
from bitwright.ir.dtype import DTYPES, dtype
from bitwright.ir.graph import Graph

MAGIC = b"BWCODE\0\1"
ALIGN = 64
START = len(MAGIC) + 32
"""Where the digest ends and what it covers begins."""
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class CachedArtifact:
    """A compiled model as it was read: what it takes, its code, and what it was made from."""

    interface: Graph
    artifact: CompiledArtifact
    weights: Mapping[str, str]
    """Digests of the files beside the model that hold its weights, by name."""


def write(path: Path, graph: Graph, artifact: CompiledArtifact, weights: Mapping[str, str]) -> str:
    """Store a graph's code; the digest of the file. A `Refusal` says why it cannot be stored."""
    from bitwright.backends.cpu.runtime.sizes import SizeChecks, checks_text

    encoder = Encoder()
    index = encoder.encode(graph, artifact)
    assert isinstance(artifact.checks, SizeChecks)
    index["checks"] = checks_text(artifact.checks)
    index["weights"] = dict(weights)
    parts: list[Any] = [memoryview(item) for item in artifact.objects]
    parts += [np.ascontiguousarray(a).reshape(-1).view(np.uint8).data for a in encoder.arrays]
    places, offset = [], 0
    for part in parts:
        places.append([offset, len(part)])
        offset += -(-len(part) // ALIGN) * ALIGN
    split = len(artifact.objects)
    index["objects"] = places[:split]
    index["arrays"] = [
        [dtype(array.dtype).name, list(array.shape), *place]
        for array, place in zip(encoder.arrays, places[split:], strict=True)
    ]
    text = json.dumps(index).encode()
    head = len(text).to_bytes(8, "little") + bytes(ALIGN - START - 8) + text
    head += bytes(-len(text) % ALIGN)
    digest = hashlib.sha256(head)
    pieces = [piece for part in parts for piece in (part, bytes(-len(part) % ALIGN))]

    def fill(file: IO[bytes]) -> None:
        file.write(MAGIC + bytes(32) + head)
        hashing = threading.Thread(target=lambda: list(map(digest.update, pieces)))
        hashing.start()  # as long as writing takes, and beside it
        for piece in pieces:
            file.write(piece)
        hashing.join()
        file.seek(len(MAGIC))
        file.write(digest.digest())

    system.write_private(path, fill)
    return digest.hexdigest()


def read(path: Path, digests: Digests) -> CachedArtifact | None:
    """A stored model; None if there is none, or one that is truncated, corrupt or not ours."""
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
    """The name under which a model's code is stored: a hash of all that decides its content."""
    digest = hashlib.sha256()
    for part in (model_digest, *facts):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return f"model-{digest.hexdigest()}"


def touch(path: Path, digests: Digests) -> None:
    """Note the use of a file, for what is dropped first, without forgetting its digest."""
    digests.keeping(path, START, lambda: os.utime(path))
