"""The kernels of a program, compiled in threads before their first launch, with the configuration
that tuning chose."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from bitwright.backends.gpu.codegen.source import Config, KernelSource
from bitwright.backends.gpu.requirements import load_torch
from bitwright.backends.gpu.runtime.launch import Kernel
from bitwright.backends.gpu.runtime.tuning import Tuner
from bitwright.system import cores

Call = tuple[str, Mapping[str, Any], Mapping[str, int]]
"""The name of a kernel, its tensors and its sizes."""
MOST_THREADS = 32


class KernelError(Exception):
    """A kernel that no configuration compiles or starts."""

    def __init__(self, kernel: str, node: str, reason: str) -> None:
        super().__init__(reason)
        self.kernel, self.node, self.reason = kernel, node, reason


class KernelTable:
    """Kernels by name and configuration."""

    def __init__(self, sources: Mapping[str, KernelSource], tuner: Tuner) -> None:
        self.sources, self.tuner = sources, tuner
        self._loaded: dict[tuple[str, str], Kernel] = {}
        self._ready: set[tuple[str, str, str]] = set()
        """Compiled kernels: names of source and configuration, form of the arguments."""

    def kernel(self, name: str, tensors: Mapping[str, Any], sizes: Mapping[str, int]) -> Kernel:
        """The kernel for these sizes."""
        source = self.sources[name]
        self.compile([(name, tensors, sizes)])
        form = form_of(tensors, sizes)
        ready = None
        if not self.tuner.machine.interpreted:
            ready = {
                config.name for config in source.configs if (name, config.name, form) in self._ready
            }
        return self.loaded(source, self.tuner.choose(source, tensors, sizes, self.loaded, ready))

    def compile(self, calls: Iterable[Call]) -> None:
        """Compile what the calls need in threads: the choice of each, and the candidates that
        tuning will measure as long as its time lasts."""
        if self.tuner.machine.interpreted:
            return
        ranked: dict[tuple[str, str, str], tuple[int, Callable[[], None]]] = {}
        for name, tensors, sizes in calls:
            source, form = self.sources[name], form_of(tensors, sizes)
            for rank, config in enumerate(self.tuner.candidates(source, sizes)):
                key = name, config.name, form
                if key in self._ready:
                    continue
                kernel = self.loaded(source, config)
                work = _compiler(kernel, tensors, sizes)
                if key not in ranked or rank < ranked[key][0]:
                    ranked[key] = rank, work
        self._compile_in_threads(ranked)

    def _compile_in_threads(
        self, ranked: Mapping[tuple[str, str, str], tuple[int, Callable[[], None]]]
    ) -> None:
        order = sorted(ranked, key=lambda key: ranked[key][0])
        if not order:
            return
        threads = min(len(order), cores(), MOST_THREADS)
        pool = ThreadPoolExecutor(max(threads, 1), "bitwright-gpu-compile")
        try:
            found = {key: pool.submit(ranked[key][1]) for key in order}
            needed = [found[key] for key in order if ranked[key][0] == 0]
            wait(needed)
            with self.tuner.spending():
                self._wait_for_more(list(found.values()))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        for key, future in found.items():
            if future.done() and not future.cancelled() and future.exception() is None:
                self._ready.add(key)

    def _wait_for_more(self, futures: list[Future[None]]) -> None:
        """Wait for candidates as long as tuning has time; those not begun by then are dropped."""
        _, waiting = wait(futures, self.tuner.seconds_left / 2)
        for future in waiting:
            future.cancel()

    def loaded(self, source: KernelSource, config: Config) -> Kernel:
        key = source.name, config.name
        if key not in self._loaded:
            self._loaded[key] = Kernel(source, config)
        return self._loaded[key]

    def others(self, kernel: Kernel) -> list[Kernel]:
        """The kernel's other candidates."""
        source = kernel.source
        return [self.loaded(source, c) for c in source.configs if c.name != kernel.config.name]


def form_of(tensors: Mapping[str, Any], sizes: Mapping[str, int]) -> str:
    """What Triton compiles a kernel for: the alignment of addresses, and of sizes."""
    pointers = "".join(str(int(tensor.data_ptr() % 16 == 0)) for tensor in tensors.values())
    return f"{pointers} {' '.join(_form_of_size(size) for size in sizes.values())}"


def _form_of_size(size: int) -> str:
    if size == 1:
        return "1"
    return f"{int(size % 16 == 0)}{int(-(2**31) <= size < 2**31)}"


def _compiler(
    kernel: Kernel, tensors: Mapping[str, Any], sizes: Mapping[str, int]
) -> Callable[[], None]:
    """A function that compiles a kernel in any thread."""
    kernel.prime()
    torch = load_torch()
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def work() -> None:
        if device is None:
            kernel.compile(tensors, sizes)
            return
        with torch.cuda.device(device):
            kernel.compile(tensors, sizes)

    return work
