"""A kernel as generated Triton source text and the facts of its launch.

    source = KernelSource(
        family="copy_f32",
        body='''
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, i < n), i < n)
    ''',
        pointers={"x": f32, "y": f32},                     # in the order of the arguments
        sizes=("n",),                                      # run-time integers
        configs=(Config({"BLOCK": 1024}), Config({"BLOCK": 4096}, num_warps=8)),
        grid=lambda size: (cdiv(size["n"], size["BLOCK"]),),   # sizes and constants by name
    )

`module()` is the whole text: imports, the helper functions that the body calls (`codegen.library`)
and one `@triton.jit` function named `kernel` with the arguments pointers, sizes, constants. Equal
texts are one function (`codegen.load`). `body` is the function's body; its first line determines
what is cut from the left of all lines.

`configs` are the candidates of tuning: block sizes (constexpr), warps and pipeline stages. The
first
is the static choice. Candidates give the same integers; the last bits of float sums may differ.

`descriptors` are pointers that the body gets as TMA descriptors: `x.load([row, column])`. They are
made on the host at launch from a base address that is a multiple of 16.

Contraction of a*b+c into fused multiply-adds is off unless `contracts`: results are the IEEE
operations that the text says, so that integers requantize to the same bits as on the CPU.
"""

from __future__ import annotations

import hashlib
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from bitwright.backends.gpu.codegen import library
from bitwright.ir.dtype import DType

CHAINING = "from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait\n"
CHAINED = (9, 0)
"""The capability from which kernels are chained (`KernelSource.module`)."""
Grid = Callable[[Mapping[str, int]], Sequence[int]]


WAIT = "# wait"
"""A line of a body, once on every path: a chained kernel waits there, and reads only constants
before it. Without it, all of the body waits."""


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class Config:
    """One candidate: constants, warps per program, pipeline stages."""

    constants: Mapping[str, int]
    num_warps: int = 4
    num_stages: int = 2

    @property
    def name(self) -> str:
        """The candidate's name where tuning remembers it."""
        blocks = " ".join(f"{name}={value}" for name, value in self.constants.items())
        return f"{blocks} warps={self.num_warps} stages={self.num_stages}"


@dataclass(frozen=True)
class Descriptor:
    """A pointer argument that becomes a TMA descriptor.

    `shape` and `strides` name sizes (or are numbers), the last stride is 1; `block` names
    constants.
    """

    shape: tuple[str | int, ...]
    strides: tuple[str | int, ...]
    block: tuple[str | int, ...]


@dataclass(frozen=True)
class Work:
    """What a launch does, for profiles: operations in a unit of the machine, from the sizes.

    `unit` is the element type of the product ("f32", "bf16", "int8", "f8e4m3fn", ...). Bytes are
    those of
    the buffers unless `bytes` says otherwise.
    """

    operations: Callable[[Mapping[str, int]], float] = lambda _: 0.0
    unit: str = ""
    bytes: Callable[[Mapping[str, int]], float] | None = None


@dataclass(frozen=True, eq=False)
class KernelSource:
    family: str
    body: str
    pointers: Mapping[str, DType]
    sizes: tuple[str, ...]
    configs: tuple[Config, ...]
    grid: Grid
    contracts: bool = False
    descriptors: Mapping[str, Descriptor] = field(default_factory=dict)
    work: Work = Work()
    helpers: str = ""
    """Further `@triton.jit` functions that the body calls, as text."""
    native_body: str = ""
    """The body on a GPU where it differs (inline PTX); `body` is its twin in plain `tl`."""
    early: str = ""
    """Statements of a chained kernel that run before it waits for the kernel before, and so read
    nothing from memory: they may bring constants to the L2 cache."""

    @property
    def constants(self) -> tuple[str, ...]:
        return tuple(self.configs[0].constants)

    def module(self, native: bool = False, chained: bool = False) -> str:
        """The whole source text. `chained` lets the kernel be put on the device while the one
        before it still runs (capability 9.0, launch option `launch_pdl`): it waits for that one
        before its first access to memory."""
        body = textwrap.dedent((native and self.native_body) or self.body).strip("\n")
        arguments = [*self.pointers, *self.sizes, *(f"{c}: tl.constexpr" for c in self.constants)]
        head = f"@triton.jit\ndef kernel({', '.join(arguments)}):\n"
        if chained:
            early = textwrap.dedent(self.early).strip("\n")
            body = body.replace(WAIT, "gdc_wait()") if WAIT in body else f"gdc_wait()\n{body}"
            body = f"gdc_launch_dependents()\n{early}\n{body}"
        own = "\n\n".join(
            part
            for part in (self.helpers.strip("\n"), head + textwrap.indent(body, "    "))
            if part
        )
        header = f"{library.HEADER}{CHAINING}" if chained else library.HEADER
        return f"{header}\n{library.needed(own, native)}\n\n{own}\n"

    @cached_property
    def name(self) -> str:
        """The family and a digest of everything that determines the code."""
        facts = (
            self.module(),
            self.native_body,
            self.early,
            tuple(self.pointers.items()),
            self.sizes,
            tuple(config.name for config in self.configs),
            self.contracts,
            tuple(self.descriptors.items()),
        )
        return f"{self.family}_{hashlib.blake2b(repr(facts).encode(), digest_size=8).hexdigest()}"
