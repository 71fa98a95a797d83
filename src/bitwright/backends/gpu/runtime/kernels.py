"""The kernels of a program, loaded on first use, with the configuration that tuning chose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bitwright.backends.gpu.codegen.source import Config, KernelSource
from bitwright.backends.gpu.runtime.launch import Kernel
from bitwright.backends.gpu.runtime.tuning import Tuner


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

    def kernel(self, name: str, tensors: Mapping[str, Any], sizes: Mapping[str, int]) -> Kernel:
        """The kernel for these sizes."""
        source = self.sources[name]
        return self.loaded(source, self.tuner.choose(source, tensors, sizes, self.loaded))

    def loaded(self, source: KernelSource, config: Config) -> Kernel:
        key = source.name, config.name
        if key not in self._loaded:
            self._loaded[key] = Kernel(source, config)
        return self._loaded[key]

    def others(self, kernel: Kernel) -> list[Kernel]:
        """The kernel's other candidates."""
        source = kernel.source
        return [self.loaded(source, c) for c in source.configs if c.name != kernel.config.name]
