"""The kernel that the compiler selects for a product of each type, and its instruction.

A probe goes through the compiler's own passes and lowering. The instruction is read from the
assembly of the kernel's LLVM text, which is what is compiled and run, and not from a table.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from bitwright import pipeline
from bitwright.backends.base import find_backend
from bitwright.backends.cpu.codegen import jit
from bitwright.backends.cpu.lowering.context import Lowering
from bitwright.backends.cpu.profile.product_loops import (
    is_integer_product,
    loop_instructions,
    product_instruction,
)
from bitwright.lir.schedule import KernelStep
from bitwright.machine.probes import BYTES, FLOATS, WEIGHTS, probe
from bitwright.target import Target

LOOPS = {
    "f64": ("f64",),
    "f32": ("f32",),
    "f16": ("f16", "bf16_tiles"),
    "bf16": ("bf16_tiles", "bf16"),
    **dict.fromkeys(BYTES, ("int8_tiles", "int8", "int8_pairs", "int16")),
}
"""Loops (`profile.product_loops`) of the instructions that multiply a type, the fastest first."""
_FEATURES = {"bf16": "avx512bf16 or amx-bf16", "f16": "avx512fp16"}


@dataclass(frozen=True)
class Selection:
    """What runs a product of a type on a target."""

    dtype: str
    kernel: str
    """The kernel's family; empty if the interpreter runs the product."""
    name: str
    """The kernel's whole name."""
    text: str
    """The kernel's LLVM text."""
    instruction: str
    """The instruction that multiplies."""
    available: str
    """The fastest instruction of the target that multiplies this type; empty if it has none."""
    loop: str
    """The register loop of the same instruction (`profile.product_loops`); empty if none."""
    is_accelerated: bool
    """Whether the kernel multiplies values of this type without converting them to f32."""
    reason: str


@cache
def select(dtype: str, target: Target) -> Selection:
    """What runs a product of a type in `probes.TYPES`, compiled and not run."""
    found = probe(dtype)
    lowering = Lowering(pipeline.optimize(found.graph, find_backend("cpu")).lowered, target)
    steps = lowering.run().steps
    kernels = [step for step in steps if isinstance(step, KernelStep)]
    products = [step for step in kernels if "matmul" in step.family] or kernels
    known = loop_instructions(target)
    loops = [name for name in LOOPS.get(dtype, ()) if name in known]
    available = known[loops[0]] if loops else ""
    if any(not isinstance(step, KernelStep) for step in steps) or not products:
        return Selection(dtype, "", "", "", "", available, "", False, "the interpreter runs it")
    step = products[-1]
    text = lowering.text(lowering.kernels[step.kernel])
    used = product_instruction(jit.assembly(text, target))
    same = (name for name in (*loops, "f32") if _are_same(known[name], used))
    is_accelerated = _is_own(dtype, used)
    return Selection(
        dtype,
        step.family,
        step.kernel,
        text,
        used,
        available,
        next(same, ""),
        is_accelerated,
        _reason(dtype, step.family, used, available, is_accelerated),
    )


def _are_same(a: str, b: str) -> bool:
    """Whether two instructions are equal, or tile products that differ in signedness."""
    return a == b or all(name.startswith("tdpb") and name[-1] == "d" for name in (a, b))


def _is_own(dtype: str, instruction: str) -> bool:
    """Whether an instruction multiplies values of a type, or of a wider integer type."""
    if dtype in BYTES:
        return is_integer_product(instruction)
    if dtype == "bf16":
        return "bf" in instruction
    if dtype == "f16":
        return instruction.endswith("ph") or instruction.startswith("tdp")
    return dtype in FLOATS and ("fm" in instruction)


def _reason(dtype: str, kernel: str, used: str, available: str, is_accelerated: bool) -> str:
    if dtype in WEIGHTS:
        where = "in the kernel" if kernel.startswith("dequant") else "at compile time"
        return f"weights are dequantized {where}, products are f32 ({used})"
    if not is_accelerated:
        if dtype in ("f32", "f64"):
            return f"the target has no fused multiply-add; {used} and an addition"
        why = f"; the target has no {_FEATURES[dtype]}" if dtype in _FEATURES else ""
        if available:
            why = f", for sums in f32; the target's {available} is not used"
        return f"values are converted to f32 and multiplied by {used}{why}"
    if used.endswith("pmaddwd") or used == "vpdpwssd":
        return f"8-bit values are widened to 16 bits: {used}"
    if used == "vpmaddubsw":
        return "pairs are summed in 16 bits by vpmaddubsw, exact by a split of the weights"
    if not _are_same(used, available):
        return f"{used}; the target also has {available}, which the compiler did not select"
    return used
