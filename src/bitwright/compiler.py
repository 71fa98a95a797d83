"""`bw.compile`: loads a model and compiles it, with a cache of compiled models around both.

A warm start imports no frontend, no pass and no lowering. The `graph` and `history` of its
executable are recomputed from the model's file when they are first read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitwright import system
from bitwright.backends.base import Backend, CachedModel, CacheEntry, find_backend
from bitwright.backends.cpu.cache.models import model_changed
from bitwright.executable import Executable
from bitwright.ir.graph import Graph

if TYPE_CHECKING:
    from bitwright.passes.manager import History
    from bitwright.passes.precision.policy import Policy
    from bitwright.pipeline import Optimized

    Precision = str | Policy | Mapping[str, Any] | None


def compile(
    model: Any,
    target: str = "cpu",
    threads: int | None = None,
    precision: str | Policy | Mapping[str, Any] | None = None,
) -> Executable:
    """An executable of a model: a graph, path, bytes, ModelProto or torch.export program.

    `target` names a backend: "cpu" (machine code for this processor) or "reference" (the
    interpreter). `threads` None means one per core. A node without a kernel runs in the
    interpreter: `explain` shows it, and one warning names it. `precision` is a policy: "f32",
    "f16", "mixed_conservative", "mixed", "mixed_bf16", or a custom one as
    `passes.precision.policy` defines it; None means the policy in the model's metadata, else f32.

    The cache folder keeps the compiled form of model files, so that the next process starts fast.
    """
    options = Options(target, threads, precision)
    backend = find_backend(target)
    entry = options.cache_entry(model, backend)
    found = None if entry is None else entry.read()
    if found is None:
        executable, files = _compile(model, backend, options)
        if entry is None:
            return executable
        engine: Any = executable.engine
        found = entry.write(engine.graph, engine.artifact, files)
        if found is None:
            return executable
        del executable, engine  # their constants: those of the cached file replace them
        system.trim_memory()
    assert entry is not None
    return CachedExecutable(backend, entry, found, options)


def _compile(
    model: Any, backend: Backend[Any, Any], options: Options
) -> tuple[Executable, Iterable[Path]]:
    """The executable of a model, and the files of its external weights."""
    with backend.prepare():
        graph, files = _load(model)
        executable = _pipeline().compile_graph(graph, *options.values)
    executable.recipe = Recipe.of(model, graph, options)
    return executable, files


def _pipeline() -> Any:
    from bitwright import pipeline  # slow to import, with all its passes

    return pipeline


def _load(model: Any) -> tuple[Graph, tuple[Path, ...]]:
    from bitwright.frontend.load import load_with_files  # slow to import

    return load_with_files(model)


@dataclass(frozen=True)
class Options:
    """The options of `compile`."""

    target: str
    threads: int | None
    precision: Precision

    @property
    def values(self) -> tuple[str, int | None, Precision]:
        return self.target, self.threads, self.precision

    def cache_entry(self, model: Any, backend: Backend[Any, Any]) -> CacheEntry[Any] | None:
        """The model's cache entry; None for a model or options that are not cached."""
        if not isinstance(model, (str, Path)) or (self.threads is not None and self.threads < 1):
            return None
        precision, has_text = self.precision, True
        if precision is not None:  # a policy's text is part of the key
            own_text: Any = type(precision).__str__
            has_text = own_text is not object.__str__ and not isinstance(precision, Mapping)
        if not has_text:
            return None
        return backend.cache_entry(Path(model), str(precision) if precision else None)


class CachedExecutable(Executable):
    """An executable from the cache; `graph` and `history` are recomputed on first use."""

    def __init__(
        self,
        backend: Backend[Any, Any],
        entry: CacheEntry[Any],
        found: CachedModel[Any],
        options: Options,
    ) -> None:
        self._backend, self._entry, self._precision = backend, entry, options.precision
        self.recipe = Recipe(entry.load_model, options)
        self._present(found.interface)
        self.engine = backend.load(found.interface, found.artifact, options.threads)

    @cached_property
    def _optimized(self) -> Optimized:
        graph = self._entry.load_model()
        found: Optimized = _pipeline().optimize(graph, self._backend, self._precision)
        return found

    @property
    def graph(self) -> Graph:  # type: ignore[override]
        return self._optimized.graph

    @property
    def history(self) -> History:  # type: ignore[override]
        return self._optimized.history


@dataclass(frozen=True)
class Recipe:
    """The model and the options of `compile`, for pickling an executable."""

    load: Callable[[], Graph]
    options: Options

    @classmethod
    def of(cls, model: Any, graph: Graph, options: Options) -> Recipe:
        """A file is read again when needed; any other model is held as its graph."""
        if not isinstance(model, (str, Path)):
            return cls(lambda: graph, options)
        path = Path(model).absolute()
        return cls(_ModelFile(path, _state(path)), options)

    def reconstruct(self) -> tuple[Any, tuple[Any, ...]]:
        return compile, (self.load(), *self.options.values)


@dataclass(frozen=True)
class _ModelFile:
    """Loads a model's file; raises if its size or time has changed."""

    path: Path
    state: tuple[int, int]

    def __call__(self) -> Graph:
        try:
            unchanged = _state(self.path) == self.state
        except OSError:
            unchanged = False
        if not unchanged:
            raise model_changed(self.path)
        return _load(self.path)[0]


def _state(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns
