"""Compiles kernels for a GPU that need not be there, and reads what the compiler reports.

    report = compile_static(source, config, (9, 0))
    report.registers, report.spills, report.shared, report.instructions

Triton's own ptxas and cuobjdump are used. It does not work where TRITON_INTERPRET=1 was set when
Triton was imported.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitwright.backends.gpu.codegen.load import interpreted, load_kernel
from bitwright.backends.gpu.codegen.source import CHAINED, Config, KernelSource
from bitwright.backends.gpu.codegen.types import signature_type
from bitwright.backends.gpu.requirements import load_triton
from bitwright.errors import CompileError

WARP = 32
WIDEST_ALIGNMENT = 16
"""Of sizes, as Triton specializes kernels."""
_INSTRUCTIONS = {
    "chained": r"griddepcontrol\.wait",
    "wgmma": r"wgmma\.mma_async",
    "mma": r"\bmma\.sync",
    "tma": r"cp\.async\.bulk\.tensor",
    "cp_async": r"cp\.async\.(?:cg|ca)",
    "dp4a": r"\bdp4a",
    "v4_loads": r"ld\.global[^;]*\.v4",
    "local": r"(?:ld|st)\.local",
}


@dataclass(frozen=True)
class Report:
    """What the compiler made of one kernel."""

    name: str
    config: str
    capability: tuple[int, int]
    registers: int
    spills: int
    """Bytes of local memory per thread."""
    shared: int
    """Bytes of shared memory per program."""
    instructions: dict[str, int]
    """How often the PTX has some instructions: wgmma, mma, tma, cp_async, ..."""


def compile_static(
    source: KernelSource,
    config: Config,
    capability: tuple[int, int],
    is_wide: bool = False,
    sizes: Mapping[str, object] | None = None,
) -> Report:
    """The report of one kernel with one configuration; raises a `CompileError` with the reason.

    Sizes are taken as 32-bit integers, or 64-bit ones if `is_wide`, and pointers as aligned to 16
    bytes. As at a launch, known `sizes` that are multiples of 16 count as such, and those of 1 are
    constants of the kernel.
    """
    triton = load_triton()
    if interpreted():
        raise CompileError("kernels are interpreted in this process (TRITON_INTERPRET=1)")
    compiler = importlib.import_module("triton.compiler")
    targets = importlib.import_module("triton.backends.compiler")
    function = load_kernel(source.module(native=True, chained=capability >= CHAINED))
    signature, attributes = _signature(source, config, "i64" if is_wide else "i32")
    constants = dict(config.constants)
    for number, name in enumerate(source.sizes, len(source.pointers)):
        known = (sizes or {}).get(name)
        if known == 1:
            signature[name], constants[name] = "constexpr", 1
        elif isinstance(known, int) and known % WIDEST_ALIGNMENT == 0:
            attributes[(number,)] = [["tt.divisibility", WIDEST_ALIGNMENT]]
    text = compiler.ASTSource(
        fn=function, signature=signature, constexprs=constants, attrs=attributes
    )
    target = targets.GPUTarget("cuda", 10 * capability[0] + capability[1], WARP)
    options = {
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "enable_fp_fusion": source.contracts,
    }
    try:
        compiled: Any = triton.compile(text, target=target, options=options)
    except Exception as error:  # the compiler raises errors of many types
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CompileError(
            f"kernel {source.family} does not compile for sm_{capability[0]}{capability[1]}",
            found=reason[-1][:300],
            where=config.name,
        ) from error
    ptx = str(compiled.asm["ptx"])
    registers, spills = _resources(compiled.asm["cubin"])
    counts = {name: len(re.findall(form, ptx)) for name, form in _INSTRUCTIONS.items()}
    return Report(
        source.name,
        config.name,
        capability,
        registers,
        spills,
        int(compiled.metadata.shared),
        {name: count for name, count in counts.items() if count},
    )


def _signature(
    source: KernelSource, config: Config, size: str
) -> tuple[dict[str, str], dict[tuple[int, ...], Any]]:
    signature: dict[str, str] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for number, (name, dtype) in enumerate(source.pointers.items()):
        form = source.descriptors.get(name)
        if form is None:
            signature[name] = f"*{signature_type(dtype)}"
            attributes[(number,)] = [["tt.divisibility", 16]]
            continue
        block = [config.constants[b] if isinstance(b, str) else b for b in form.block]
        signature[name] = f"tensordesc<{signature_type(dtype)}{block}>"
    signature |= dict.fromkeys(source.sizes, size)
    signature |= dict.fromkeys(config.constants, "constexpr")
    return signature, attributes


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory, from cuobjdump."""
    package = Path(load_triton().__file__ or "").parent
    tool = package / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        found = subprocess.run(
            [str(tool), "-res-usage", str(file)], capture_output=True, text=True, check=False
        )
    text = found.stdout + found.stderr
    registers = re.search(r"REG:(\d+)", text)
    local = re.search(r"LOCAL:(\d+)", text)
    stack = re.search(r"STACK:(\d+)", text)
    spilled = max(int(m.group(1)) if m else 0 for m in (local, stack))
    return int(registers.group(1)) if registers else 0, spilled
