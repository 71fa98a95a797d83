"""The interface of a backend, and the registry that `bw.compile(target=...)` looks it up in.

    backend = find_backend("cpu")
    artifact = backend.build(graph)                    # after `backend.passes`
    engine = backend.load(graph, artifact, threads=4)
    engine.run({"x": array}, out=None)

The registry imports a backend's module when the backend is first used.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np

from bitwright.errors import BitwrightError
from bitwright.ir.graph import Graph
from bitwright.lir.schedule import Step

if TYPE_CHECKING:  # slow to import, and a warm start runs no pass
    from bitwright.passes.manager import Pass
    from bitwright.passes.precision.policy import Policy

Array = np.ndarray[Any, Any]
ArtifactT = TypeVar("ArtifactT")
ArtifactT_co = TypeVar("ArtifactT_co", covariant=True)


@dataclass(frozen=True)
class TimedStep:
    step: Step
    seconds: float
    """The minimum over all rounds."""


@dataclass(frozen=True)
class Profile:
    """The time of a run, by step."""

    steps: tuple[TimedStep, ...]
    run_seconds: float
    """The minimum time of a whole run, measured by the caller."""
    overhead_seconds: float
    """The time outside of steps: binding inputs, waking threads, allocating outputs."""
    barrier_seconds: float
    """The time of an empty kernel call and the barrier after it."""
    threads: int
    bindings: Mapping[str, int]
    """All sizes of the run, including data-dependent ones."""


class Engine(Protocol):
    """A loaded graph: code, constants and memory, ready to run."""

    states: dict[str, Array]

    @property
    def description(self) -> str:
        """Where the graph runs, for people: "on the CPU with 2 threads"."""
        ...

    def copy(self) -> Engine:
        """An engine that shares code and constants and has its own states and memory."""
        ...

    def run(self, feeds: Mapping[str, Any], out: Mapping[str, Array] | None) -> dict[str, Any]:
        """Outputs by name; arrays in `out` are written in place."""
        ...

    def profile(self, feeds: Mapping[str, Any], rounds: int) -> Profile:
        """The time of each step; states do not change."""
        ...


EngineT = TypeVar("EngineT", bound=Engine)


class CachedModel(Protocol[ArtifactT_co]):
    """A compiled model that was read from the cache."""

    @property
    def interface(self) -> Graph:
        """A graph with the model's inputs, states and outputs."""
        ...

    @property
    def artifact(self) -> ArtifactT_co: ...


class CacheEntry(Protocol[ArtifactT]):
    """The cache entry of one model file."""

    def read(self) -> CachedModel[ArtifactT] | None:
        """The compiled model; None if there is no valid entry."""
        ...

    def write(
        self, graph: Graph, artifact: ArtifactT, files: Iterable[Path]
    ) -> CachedModel[ArtifactT] | None:
        """Write the entry and read it back; None if that fails. `files` hold external weights."""
        ...

    def load_model(self) -> Graph:
        """The graph of the model file; raises if the file has changed."""
        ...


class Backend(ABC, Generic[ArtifactT, EngineT]):
    """Compiles graphs for one kind of machine.

    `build` makes an artifact from a graph; it may be cached. `load` makes an engine from an
    artifact; it never compiles.
    """

    @property
    def passes_before_precision(self) -> tuple[Pass, ...]:
        """Passes that run before a precision policy is applied; skipped without a policy."""
        return ()

    def passes_after_precision(self, policy: Policy) -> tuple[Pass, ...]:
        """Passes that run after a precision policy was applied; skipped without a policy."""
        return ()

    @property
    @abstractmethod
    def passes(self) -> tuple[Pass, ...]:
        """Passes that run after `pipeline.INFERENCE` and the precision policy."""

    @property
    def step_passes(self) -> tuple[Pass, ...]:
        """What takes the place of `passes` for training steps."""
        return self.passes

    @abstractmethod
    def build(self, graph: Graph) -> ArtifactT:
        """Lower a graph that went through `passes`, and generate its code."""

    @abstractmethod
    def load(self, graph: Graph, artifact: ArtifactT, threads: int | None = None) -> EngineT:
        """Load the code and allocate memory. `threads` None means one per core."""

    def compile(self, graph: Graph, threads: int | None = None) -> EngineT:
        """`build` and `load`."""
        return self.load(graph, self.build(graph), threads)

    def prepare(self) -> AbstractContextManager[None]:
        """Held around loading and compiling a model, to start work that takes long early."""
        return nullcontext()

    def cache_entry(self, model: Path, precision: str | None) -> CacheEntry[ArtifactT] | None:
        """The cache entry of a model file; None where the backend does not cache it."""
        return None


_MODULES = {
    "cpu": "bitwright.backends.cpu.backend",
    "cuda": "bitwright.backends.gpu.backend",
    "reference": "bitwright.backends.reference",
}
"""The module that defines `BACKEND`, by target name."""


def register_backend(name: str, module: str) -> None:
    """Make `bw.compile(target=name)` use the `BACKEND` of a module."""
    _MODULES[name] = module


def backend_names() -> tuple[str, ...]:
    return tuple(sorted(_MODULES))


def find_backend(name: str) -> Backend[Any, Any]:
    """The backend of a target name; an unknown name raises an error that lists the known ones."""
    if name not in _MODULES:
        known = ", ".join(map(repr, backend_names()))
        raise BitwrightError(f"there is no target {name!r}", expected=f"one of {known}")
    found: Backend[Any, Any] = importlib.import_module(_MODULES[name]).BACKEND
    return found
