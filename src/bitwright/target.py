"""Targets: facts about machines that code is generated for.

    host()            the target of this process: its machine, or the smaller one that
                      `BITWRIGHT_TARGET` names
    machine()         the machine this process runs on
    named("avx2")     a fixed target: amx, avx512fp16, avx512bf16, avx512vnni, avx512, avx2, sse2,
                      aarch64, riscv64, wasm32, generic

Feature names are LLVM's. Kernels query `features` with `has`; LLVM gets `llvm_features`, so that it
generates no instruction outside the set.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import llvmlite  # type: ignore[import-untyped]

from bitwright import knobs, system
from bitwright.errors import CompileError


@dataclass(frozen=True)
class Target:
    name: str
    triple: str
    cpu: str
    features: frozenset[str]
    vector_bytes: int
    """The width of vector registers that kernels use."""
    vector_registers: int
    cores: int
    l1_bytes: int
    l2_bytes: int
    l3_bytes: int
    llvm_features: str
    abi: str = ""
    """The ABI name, for architectures that have several."""

    @property
    def architecture(self) -> str:
        return _architecture(self.triple)

    @property
    def is_x86(self) -> bool:
        return self.architecture == "x86_64"

    @property
    def has_fma(self) -> bool:
        """Whether a fused multiply-add is one instruction."""
        return bool(self.features & {"fma", "neon", "f"})

    @property
    def converts_f16(self) -> bool:
        """Whether f16 <-> f32 conversion is native."""
        return bool(self.features & {"f16c", "neon", "zvfhmin", "zvfh"})

    @property
    def computes_f16(self) -> bool:
        """Whether f16 arithmetic is native."""
        return bool(self.features & {"avx512fp16", "fullfp16"})

    def has(self, *features: str) -> bool:
        return self.features.issuperset(features)

    def lanes(self, bits: int) -> int:
        """Elements of this width in one vector register."""
        return max(1, self.vector_bytes * 8 // bits)

    def runs_here(self) -> bool:
        """Whether this process can execute code for the target."""
        here = machine()
        return self.architecture == here.architecture and self.features <= here.features

    def __str__(self) -> str:
        return self.name


def _architecture(triple: str) -> str:
    name = triple.split("-", 1)[0]
    return "aarch64" if name == "arm64" else name


_X86_LEVELS = (
    ("sse", "sse2", "cmov", "cx8", "fxsr"),
    ("sse3", "ssse3", "sse4.1", "sse4.2", "popcnt", "cx16", "sahf"),
    ("avx", "avx2", "fma", "f16c", "bmi", "bmi2", "lzcnt", "movbe"),
    ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
    ("avx512vnni",),
    ("avx512bf16",),
    ("amx-tile", "amx-bf16", "amx-int8"),
)
_TILES = frozenset(("amx-tile", "amx-bf16", "amx-int8", "amx-fp16", "amx-complex", "amx-fp8"))
"""Features that need permission from the system."""


def _x86(levels: int) -> frozenset[str]:
    return frozenset(feature for level in _X86_LEVELS[:levels] for feature in level)


_LINUX = "unknown-linux-gnu"
_RISCV = frozenset(("64bit", "m", "a", "f", "d", "c"))
# name: (triple, features)
_NAMED = {
    "amx": (f"x86_64-{_LINUX}", _x86(7)),
    "avx512fp16": (f"x86_64-{_LINUX}", _x86(6) | {"avx512fp16"}),
    "avx512bf16": (f"x86_64-{_LINUX}", _x86(6)),
    "avx512vnni": (f"x86_64-{_LINUX}", _x86(5)),
    "avx512": (f"x86_64-{_LINUX}", _x86(4)),
    "avx2": (f"x86_64-{_LINUX}", _x86(3)),
    "sse2": (f"x86_64-{_LINUX}", _x86(1)),
    "aarch64": (f"aarch64-{_LINUX}", frozenset(("neon", "fp-armv8", "dotprod", "fullfp16"))),
    "riscv64": (f"riscv64-{_LINUX}", _RISCV | {"v"}),
    "wasm32": ("wasm32-unknown-unknown", frozenset(("simd128",))),
}
NAMES = (*_NAMED, "generic")
_BASE = {"x86_64": _x86(1), "aarch64": frozenset(("neon", "fp-armv8")), "riscv64": _RISCV}
_CPU = {"x86_64": "x86-64", "riscv64": "generic-rv64"}


def _make(
    name: str, triple: str, features: frozenset[str], cpu: str = "", llvm_features: str = ""
) -> Target:
    architecture = _architecture(triple)
    vector_bytes, registers = _vectors(architecture, features)
    native = name == "host" or architecture == machine().architecture
    caches = system.caches() if native else system.Caches()
    return Target(
        name,
        triple,
        cpu or _CPU.get(architecture, "generic"),
        features,
        vector_bytes,
        registers,
        system.cores() if native else 1,
        caches.l1,
        caches.l2,
        caches.l3,
        llvm_features or ",".join(f"+{feature}" for feature in sorted(features)),
        "lp64d" if architecture == "riscv64" else "",
    )


def _vectors(architecture: str, features: frozenset[str]) -> tuple[int, int]:
    """The width in bytes and the number of vector registers."""
    if architecture == "x86_64":
        if "avx512f" in features:
            return 64, 32
        return (32, 16) if "avx2" in features else (16, 16)
    return 16, 32 if features & {"neon", "v"} else 16


@cache
def named(name: str) -> Target:
    """A target by name; `host` is this machine, `generic` its architecture's baseline."""
    here = machine()
    if name == "host":
        return here
    if name == "generic":
        return _make(name, here.triple, _BASE.get(here.architecture, frozenset()))
    if name not in _NAMED:
        raise CompileError(f"no target is named {name!r}", expected=", ".join(("host", *NAMES)))
    triple, features = _NAMED[name]
    if _architecture(triple) == here.architecture:
        triple = here.triple  # this system's calling convention
    return _make(name, triple, features)


def host() -> Target:
    """The target of this process: its machine, or the one that `BITWRIGHT_TARGET` names."""
    return _restricted(knobs.TARGET.get().strip() or "host")


@cache
def _restricted(name: str) -> Target:
    if name not in ("host", *NAMES):
        raise CompileError(
            f"no target is named {name!r}",
            where=knobs.TARGET.name,
            expected=", ".join(("host", *NAMES)),
        )
    target = named(name)
    if not target.runs_here():
        missing = sorted(target.features - machine().features)
        raise CompileError(
            f"code for {name!r} does not run on this machine",
            where=knobs.TARGET.name,
            found=f"a machine without {', '.join(missing)}" if missing else str(machine().triple),
            hint="Name a smaller target, or unset the variable.",
        )
    return target


@cache
def machine() -> Target:
    """The machine this process runs on."""
    triple, cpu, llvm_features = _cached_host() or _query_llvm()
    present = frozenset(name[1:] for name in llvm_features.split(",") if name[:1] == "+")
    features = present | _BASE.get(_architecture(triple), frozenset())
    if features & _TILES and not system.allow_tiles():
        features -= _TILES
        words = (f"-{w[1:]}" if w[1:] in _TILES else w for w in llvm_features.split(","))
        llvm_features = ",".join(words)
    return _make("host", triple, features, cpu, llvm_features)


def _host_file() -> Path | None:
    """The file that caches LLVM's description of this processor."""
    folder, processor = system.cache_folder(), system.processor()
    if folder is None or not processor:
        return None
    return folder / f"host-{llvmlite.__version__}-{processor[:32]}"


def _cached_host() -> tuple[str, str, str] | None:
    """Cached triple, name and features; loading LLVM takes 0.1 s and 50 MB."""
    path = _host_file()
    data = system.read_entry(path) if path is not None else None
    if data is None:
        return None
    triple, cpu, features = data.decode().splitlines()
    return triple, cpu, features


def _query_llvm() -> tuple[str, str, str]:
    path = _host_file()
    facts = (_query_in_process() if path is not None else None) or llvm_facts()
    if path is not None:
        with suppress(OSError):
            system.write_entry(path, "\n".join(facts).encode())
    return facts


def llvm_facts() -> tuple[str, str, str]:
    """LLVM's triple, name and features of this processor."""
    import llvmlite.binding as llvm  # type: ignore[import-untyped]

    features = llvm.get_host_cpu_features().flatten()
    return llvm.get_process_triple(), llvm.get_host_cpu_name(), features


def _query_in_process() -> tuple[str, str, str] | None:
    """`llvm_facts` from a child process, which releases LLVM's memory when it ends.

    A child of an emulated process is not emulated; facts about another processor are ignored.
    """
    process = system.start_python(
        "from bitwright import system, target; "
        "print(system.processor(), *target.llvm_facts(), sep=chr(10))"
    )
    if process is None:
        return None
    lines = process.communicate()[0].decode().splitlines()
    if len(lines) != 4 or lines[0] != system.processor():
        return None
    return lines[1], lines[2], lines[3]
