"""`bw.compile`: a model that was compiled before is mapped from the cache, any other is compiled.

A warm start imports no frontend, no pass and no lowering; `graph` and `history` of its executable
are made when they are asked for, from the model's file.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bitwright import knobs, system
from bitwright.backends.cpu.cache import artifact as stored
from bitwright.backends.cpu.cache.digests import Digests
from bitwright.backends.cpu.cache.objects import default_cache
from bitwright.backends.cpu.cache.serialize import Refusal
from bitwright.backends.cpu.runtime.program import Program
from bitwright.errors import BitwrightError
from bitwright.executable import Executable
from bitwright.ir.graph import Graph
from bitwright.target import host

if TYPE_CHECKING:
    from bitwright.passes.manager import History
    from bitwright.passes.precision.policy import Policy

_PACKAGES = ("ml_dtypes", "onnx", "llvmlite")
"""What decides the code besides numpy and bitwright itself."""
_INDIFFERENT = (knobs.CACHE, knobs.CACHE_BYTES, knobs.COMPILERS, knobs.TAP_BYTES)
"""Knobs that change no code; every other one, known now or later, is part of a model's key."""


def compile(
    model: Any,
    target: str = "cpu",
    threads: int | None = None,
    precision: str | Policy | Mapping[str, Any] | None = None,
) -> Executable:
    """Make a model (graph, path, bytes, ModelProto or program of torch.export) ready to run.

    `target` is "cpu" (machine code for this processor, generated here) or "reference" (the
    interpreter). `threads` None means as many as the machine has cores. A node without a kernel
    runs in the interpreter as a host step: `explain` shows it, and one warning names it.
    `precision` is a policy: "f32", "f16", "mixed_conservative", "mixed", "mixed_bf16", or one of
    the user's own, as `passes.precision.policy` writes them; None is what the model's metadata
    says, else f32.

    What a file was compiled to is kept in the cache folder, so that the next process starts at
    once.
    """
    options = target, threads, precision
    entry = _entry(model, precision and str(precision)) if _is_plain(*options) else None
    found = None if entry is None else entry.find()
    if found is None:
        from bitwright.backends.cpu.cache.kernel_store import (
            workers_at_hand,  # a warm start needs none
        )

        with workers_at_hand() if target == "cpu" else nullcontext():
            graph, files = _load(model)
            executable = _pipeline().compile(graph, *options)
        executable.recipe = Recipe.of(model, graph, options)
        if entry is None:
            return executable
        found = entry.store(executable.engine, files)
        if found is None:
            return executable
        del graph, executable  # with them, all constants in other forms than the stored one
        system.give_memory_back()
    return CachedExecutable(entry, found, threads)


def _is_plain(target: str, threads: int | None, precision: Any) -> bool:
    """Whether these options are among those whose code is kept."""
    has_own_text = type(precision).__str__ is not object.__str__
    has_text = precision is None or (has_own_text and not isinstance(precision, Mapping))
    return target == "cpu" and (threads is None or threads >= 1) and has_text


def _pipeline() -> Any:
    from bitwright import pipeline  # with all its passes it is slow to import

    return pipeline


def _load(model: Any) -> tuple[Graph, tuple[Path, ...]]:
    from bitwright.frontend.load import load_with_files  # so are the readers of model files

    return load_with_files(model)


class CachedExecutable(Executable):
    """An executable from the cache: it runs at once, and knows its graph when it is asked."""

    def __init__(self, entry: Entry, found: stored.Stored, threads: int | None) -> None:
        self._entry = entry
        self.recipe = Recipe(entry.load, ("cpu", threads, entry.precision))
        self._present(found.interface)
        self.engine = Program(found.interface, host(), threads or host().cores, found.code)
        found.code.warn_of_fallbacks()

    @cached_property
    def _made(self) -> tuple[Graph, History]:
        return self._entry.recompile()

    @property
    def graph(self) -> Graph:  # type: ignore[override]
        return self._made[0]

    @property
    def history(self) -> History:  # type: ignore[override]
        return self._made[1]


@dataclass(frozen=True)
class Recipe:
    """The model and the options of `compile`."""

    load: Callable[[], Graph]
    options: tuple[str, int | None, Any]

    @classmethod
    def of(cls, model: Any, graph: Graph, options: tuple[str, int | None, Any]) -> Recipe:
        """A file is read again when it is needed; anything else is kept as the graph it became."""
        if not isinstance(model, (str, Path)):
            return cls(lambda: graph, options)
        path = Path(model).absolute()
        return cls(_SameFile(path, *_times(path)), options)

    def again(self) -> tuple[Any, tuple[Any, ...]]:
        return compile, (self.load(), *self.options)


@dataclass(frozen=True)
class _SameFile:
    """A model's file, as long as it is what it was."""

    path: Path
    nbytes: int
    changed: int

    def __call__(self) -> Graph:
        try:
            same = _times(self.path) == (self.nbytes, self.changed)
        except OSError:
            same = False
        if not same:
            raise _other_file(self.path)
        return _load(self.path)[0]


def _times(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def _other_file(path: Path) -> BitwrightError:
    return BitwrightError(
        "the model's file is not what it was when the model was compiled",
        where=f"model {str(path)!r}",
        hint="Graph, history and pickles come from the file: compile it again.",
    )


@dataclass(frozen=True)
class Entry:
    """The place of one model file in the cache."""

    model: Path
    digest: str
    path: Path
    digests: Digests
    precision: str | None = None

    def find(self) -> stored.Stored | None:
        """The model as it was compiled before, if it was and its weights are the same."""
        found = stored.read(self.path, self.digests)
        if found is None or not self._beside_is(found):
            return None
        with suppress(OSError):
            default_cache().touch(self.path, lambda: stored.touch(self.path, self.digests))
        return found

    def _beside_is(self, found: stored.Stored) -> bool:
        folder = self.model.resolve().parent
        try:
            return all(self.digests.of(folder / name) == d for name, d in found.beside.items())
        except OSError:
            return False

    def store(self, program: Program, files: Iterable[Path]) -> stored.Stored | None:
        """Keep what the model was compiled to, and give it as a later process would find it."""
        cache, folder = default_cache(), self.model.resolve().parent
        with suppress(OSError, ValueError, BitwrightError, Refusal):
            beside = {str(p.relative_to(folder)): self.digests.of(p) for p in files}
            if self.digests.of(self.model) != self.digest or not cache.has_room(
                program.code.nbytes
            ):
                return None
            digest = stored.write(self.path, program.graph, program.code, beside)
            self.digests.remember(self.path, stored.START, digest)
            cache.prune()
            return stored.read(self.path, self.digests)
        return None

    def recompile(self) -> tuple[Graph, History]:
        """Graph and history again, from the file, which must be as it was."""
        executable = _pipeline().compile(self.load(), precision=self.precision)
        return executable.graph, executable.history

    def load(self) -> Graph:
        """The model's graph, from the file, which must be as it was."""
        try:
            same = self.digests.of(self.model) == self.digest
        except OSError:
            same = False
        if not same:
            raise _other_file(self.model)
        return _load(self.model)[0]


def _entry(model: Any, precision: str | None) -> Entry | None:
    """Where the compiled form of a model belongs; None for what is not kept."""
    cache = default_cache()
    folder = cache.folder
    if folder is None or knobs.DUMP.get() or not isinstance(model, (str, Path)):
        return None
    digests = Digests(folder)
    try:
        path = Path(model).absolute()
        if not path.is_file() or not cache.has_room(path.stat().st_size):
            return None  # of what is no file, the frontend says what is wrong with it
        digest = digests.of(path)
    except (OSError, ValueError):
        return None
    key = stored.key(digest, [path.suffix, f"precision {precision}", *_facts()])
    return Entry(path, digest, folder / key, digests, precision)


def _facts() -> list[str]:
    """All that decides a model's code, besides the model."""
    machine = replace(host(), cores=0, features=frozenset())  # those are in `llvm_features` too
    limits = [f"{knob.name}={knob.get()}" for knob in knobs.ALL if knob not in _INDIFFERENT]
    packages = [f"{name} {_state(name)}" for name in _PACKAGES]
    python = f"python {sys.version_info[:2]}, numpy {np.__version__}"
    return [system.sources(), str(machine), *limits, *packages, python]


def _state(package: str) -> str:
    """What tells one installation of a package from another, without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return "absent"
    found = os.stat(spec.origin)
    return f"{spec.origin} {found.st_size} {found.st_mtime_ns}"
