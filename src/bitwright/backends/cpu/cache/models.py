"""The cache entries of model files.

An entry's key is a hash of everything that determines the artifact: the model's bytes, bitwright's
sources, the packages it uses, the target and the knobs. Weights in external files are checked
against digests in the entry.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bitwright import knobs, system
from bitwright.backends.cpu.cache import artifact as artifact_file
from bitwright.backends.cpu.cache.artifact import CachedArtifact
from bitwright.backends.cpu.cache.digests import Digests
from bitwright.backends.cpu.cache.objects import default_cache
from bitwright.backends.cpu.cache.serialize import NotSerializable
from bitwright.backends.cpu.lowering import choices
from bitwright.backends.cpu.lowering.artifact import CompiledArtifact
from bitwright.errors import BitwrightError
from bitwright.ir.graph import Graph
from bitwright.target import host

_PACKAGES = ("ml_dtypes", "onnx", "llvmlite")
"""Packages that affect the artifact, besides numpy and bitwright."""
_IRRELEVANT = (knobs.CACHE, knobs.CACHE_BYTES, knobs.COMPILERS, knobs.TAP_BYTES)
"""Knobs that do not affect the artifact. Every other knob is part of the key."""


@dataclass(frozen=True)
class ModelEntry:
    """The cache entry of one model file."""

    model: Path
    digest: str
    path: Path
    digests: Digests

    def read(self) -> CachedArtifact | None:
        """The compiled model; None if there is no entry or the external weights have changed."""
        found = artifact_file.read(self.path, self.digests)
        if found is None or not self._has_weights_of(found):
            return None
        with suppress(OSError):
            default_cache().touch(self.path, lambda: artifact_file.touch(self.path, self.digests))
        return found

    def _has_weights_of(self, found: CachedArtifact) -> bool:
        folder = self.model.resolve().parent
        try:
            return all(self.digests.of(folder / name) == d for name, d in found.weights.items())
        except OSError:
            return False

    def write(
        self, graph: Graph, artifact: CompiledArtifact, files: Iterable[Path]
    ) -> CachedArtifact | None:
        """Write the entry and read it back; None if that fails."""
        cache, folder = default_cache(), self.model.resolve().parent
        with suppress(OSError, ValueError, BitwrightError, NotSerializable):
            weights = {str(p.relative_to(folder)): self.digests.of(p) for p in files}
            if not self._is_unchanged() or not cache.has_room(artifact.nbytes):
                return None
            digest = artifact_file.write(self.path, graph, artifact, weights)
            self.digests.remember(self.path, artifact_file.START, digest)
            cache.prune()
            return artifact_file.read(self.path, self.digests)
        return None

    def load_model(self) -> Graph:
        """The graph of the model file; raises if the file has changed."""
        from bitwright.frontend.load import load  # a warm start reads no model

        try:
            unchanged = self._is_unchanged()
        except OSError:
            unchanged = False
        if not unchanged:
            raise model_changed(self.model)
        return load(self.model)

    def _is_unchanged(self) -> bool:
        return self.digests.of(self.model) == self.digest


def model_changed(path: Path) -> BitwrightError:
    return BitwrightError(
        "the model's file is not what it was when the model was compiled",
        where=f"model {str(path)!r}",
        hint="Graph, history and pickles come from the file: compile it again.",
    )


def find_entry(model: Path, precision: str | None) -> ModelEntry | None:
    """The entry of a model file; None if it is not cached: no folder, a dump, a large file."""
    cache = default_cache()
    folder = cache.folder
    if folder is None or knobs.DUMP.get():
        return None
    digests = Digests(folder)
    try:
        path = model.absolute()
        if not path.is_file() or not cache.has_room(path.stat().st_size):
            return None  # the frontend reports a path that is not a file
        digest = digests.of(path)
    except (OSError, ValueError):
        return None
    key = artifact_file.key(digest, [path.suffix, f"precision {precision}", *key_facts()])
    return ModelEntry(path, digest, folder / key, digests)


def key_facts() -> list[str]:
    """Everything besides the model that determines its artifact."""
    machine = replace(host(), cores=0, features=frozenset())  # `llvm_features` has the features
    limits = [f"{knob.name}={knob.get()}" for knob in knobs.ALL if knob not in _IRRELEVANT]
    packages = [f"{name} {_installation(name)}" for name in _PACKAGES]
    python = f"python {sys.version_info[:2]}, numpy {np.__version__}"
    tuned = f"tuned {choices.digest(host())}"
    return [system.sources(), repr(machine), *limits, *packages, python, tuned]


def _installation(package: str) -> str:
    """Identifies the installed package without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return "absent"
    found = os.stat(spec.origin)
    return f"{spec.origin} {found.st_size} {found.st_mtime_ns}"
