"""The kernels of a program, loaded on first use, with the configuration that tuning chose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bitwright.backends.gpu.codegen.source import Config, KernelSource
from bitwright.backends.gpu.runtime.launch import Kernel


class KernelTable:
    """Kernels by name and configuration."""

    def __init__(self, sources: Mapping[str, KernelSource]) -> None:
        self.sources = sources
        self._loaded: dict[tuple[str, str], Kernel] = {}

    def kernel(self, name: str, tensors: Mapping[str, Any], sizes: Mapping[str, int]) -> Kernel:
        """The kernel for these sizes."""
        source = self.sources[name]
        return self.loaded(source, source.configs[0])

    def loaded(self, source: KernelSource, config: Config) -> Kernel:
        key = source.name, config.name
        if key not in self._loaded:
            self._loaded[key] = Kernel(source, config)
        return self._loaded[key]
