"""Compiles the graph of a language model, and keeps the result in the cache folder.

The key holds the file of the model and how its cache is laid out, so a warm start neither builds
the graph nor runs a pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitwright import system
from bitwright.backends.base import CachedModel, CacheEntry, find_backend
from bitwright.compiler import CachedExecutable, Options, compile
from bitwright.executable import Executable
from bitwright.frontend.huggingface.folder import weight_files
from bitwright.ir.graph import Graph


@dataclass(frozen=True)
class _Entry:
    """The entry of a file, whose graph is that of the loaded model."""

    entry: CacheEntry[Any]
    model: Any

    def read(self) -> CachedModel[Any] | None:
        return self.entry.read()

    def write(self, graph: Graph, artifact: Any, files: Iterable[Path]) -> CachedModel[Any] | None:
        return self.entry.write(graph, artifact, files)

    def load_model(self) -> Graph:
        graph: Graph = self.model.graph
        return graph


def _weights_of(folder: Path) -> list[Path]:
    """The files of a Hugging Face folder that hold its weights, and their index.

    Their contents are compared when the entry is read. Their names are part of its key: a file may
    be added, and files of a snapshot are links to others.
    """
    return [file for name in weight_files(folder) if (file := folder / name).is_file()]


def _states(files: Iterable[Path]) -> list[tuple[int, ...]]:
    """What changes with the contents of files."""
    with suppress(OSError):
        found = [file.stat() for file in files]
        return [(one.st_size, one.st_mtime_ns, one.st_ino, one.st_dev) for one in found]
    return []


def compile_model(
    model: Any, path: Path | None, layout: str, threads: int | None, target: str = "cpu"
) -> Executable:
    """The executable of `model.graph`; of a file, it is cached under `layout`."""
    options = Options(target, threads, None)
    backend = find_backend(target)
    files: list[Path] = []
    inner = None
    if path is not None and path.is_dir():  # its configuration stands for it
        files = _weights_of(path)
        names = " ".join(sorted(f"{file.name} {file.resolve().name}" for file in files))
        inner = backend.cache_entry(path / "config.json", f"language model {layout} {names}")
    elif path is not None:
        inner = backend.cache_entry(path, f"language model {layout}")
    if inner is None:
        return compile(model.graph, target=target, threads=threads)
    entry, before = _Entry(inner, model), _states(files)
    found = entry.read()
    if found is None:
        executable = compile(model.graph, target=target, threads=threads)
        engine: Any = executable.engine
        if _states(files) != before:  # they may not be what was compiled
            return executable
        found = entry.write(engine.graph, engine.artifact, [file.resolve() for file in files])
        if found is None:
            return executable
        del executable, engine  # their constants: those of the cached file replace them
        system.trim_memory()
    return CachedExecutable(backend, entry, found, options)
