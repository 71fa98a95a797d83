"""Launches one kernel: arguments in order, constants, warps, stages, grid."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from bitwright.backends.gpu.codegen.load import interpreted, load_kernel
from bitwright.backends.gpu.codegen.source import CHAINED, Config, KernelSource
from bitwright.backends.gpu.requirements import load_torch

_INTERPRETER = threading.Lock()
"""Held while Triton's interpreter runs: it replaces functions of `tl` for all threads."""


class Kernel:
    """A loaded kernel with one configuration."""

    def __init__(self, source: KernelSource, config: Config) -> None:
        self.source, self.config = source, config
        self.is_interpreted = interpreted()
        native = not self.is_interpreted
        self.is_chained = native and load_torch().cuda.get_device_capability() >= CHAINED
        self._function = load_kernel(source.module(native, self.is_chained))

    def grid(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The numbers of programs."""
        return tuple(self.source.grid({**sizes, **self.config.constants}))

    def launch(self, tensors: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        """Start the kernel on the current stream; tensors have the types of the source's
        pointers."""
        grid = self.grid(sizes)
        if 0 in grid:
            return
        arguments = self._arguments(tensors, sizes)
        if self.is_interpreted:
            with _INTERPRETER:
                self._function[grid](*arguments, **self.config.constants)
        else:
            self._function[grid](*arguments, **self.config.constants, **self.options)

    def prime(self) -> None:
        """Make what Triton keeps per function and device, so that threads need not."""
        caches = getattr(self._function, "device_caches", None)
        if caches is not None:
            driver = importlib.import_module("triton.runtime.driver").driver
            caches[driver.active.get_current_device()]

    def compile(self, tensors: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        """Compile the kernel for these arguments and load it, without starting it."""
        grid = self.grid(sizes)
        if self.is_interpreted or 0 in grid:
            return
        arguments = self._arguments(tensors, sizes)
        compiled = self._function.warmup(
            *arguments, grid=grid, **self.config.constants, **self.options
        )
        load = getattr(compiled, "_init_handles", None)
        if load is not None:  # compiles the launcher of these types of arguments
            load()

    @property
    def options(self) -> dict[str, Any]:
        return {
            "num_warps": self.config.num_warps,
            "num_stages": self.config.num_stages,
            "enable_fp_fusion": self.source.contracts,
            **({"launch_pdl": True} if self.is_chained else {}),
        }

    def _arguments(self, tensors: Mapping[str, Any], sizes: Mapping[str, int]) -> list[Any]:
        values = {**sizes, **self.config.constants}
        arguments: list[Any] = []
        for name in self.source.pointers:
            found = tensors[name]
            if (form := self.source.descriptors.get(name)) is not None:
                tools = importlib.import_module("triton.tools.tensor_descriptor")
                shape, strides, block = (
                    [_size(item, values) for item in part]
                    for part in (form.shape, form.strides, form.block)
                )
                found = tools.TensorDescriptor(found, shape, strides, block)
            arguments.append(found)
        return arguments + [sizes[name] for name in self.source.sizes]


def _size(item: str | int, values: Mapping[str, int]) -> int:
    return values[item] if isinstance(item, str) else item


def choose(source: KernelSource, configs: Sequence[Config] | None = None) -> Config:
    """The static choice."""
    return (configs or source.configs)[0]
