"""Loops of independent multiply-adds in registers: what the instructions of a target can do.

    f64, f32, f16   fused multiply-adds, or multiplications and additions
    bf16            vdpbf16ps
    int8            vpdpbusd, usdot or sdot
    int8_pairs      vpmaddubsw, vpmaddwd and an addition
    int16           vpmaddwd and an addition, for 8-bit values widened to 16 bits
    bf16_tiles, int8_tiles   AMX

`product_instruction` finds the instruction that multiplies in assembly, of these loops and of the
kernels that the compiler selects.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from bitwright.backends.cpu.codegen import emit, instr, jit
from bitwright.backends.cpu.codegen.emit import Kernel, Module, Signature, Type, Value
from bitwright.backends.cpu.codegen.instr import Instr
from bitwright.backends.cpu.kernels.matmul.dot.amx import Amx
from bitwright.backends.cpu.kernels.matmul.dot.amx_block import BYTES, ROWS
from bitwright.target import Target

Step = Callable[[Kernel, Value, Value], Value]


@dataclass(frozen=True)
class Loop:
    """`acc = step(acc, part)`; `operations` is the number of one step."""

    acc: Type
    part: Type
    step: Step
    operations: int
    tiles: Amx | None = None
    """With tiles, acc and part are tile registers, and there is no step."""


def product_loops(target: Target) -> dict[str, Loop]:
    """The loops of a target by name."""
    loops = {"f64": _fma(target, emit.f64), "f32": _fma(target, emit.f32)}
    if target.computes_f16:
        loops["f16"] = _fma(target, emit.f16)
    for name, dot in {
        "bf16": instr.dot_bf16(target),
        "int8": instr.dot_u8s8(target) or instr.dot_s8s8(target),
    }.items():
        if dot is not None:
            loops[name] = _dot(dot)
    wide, narrow = instr.pairs_s16s16(target), instr.pairs_u8s8(target)
    if wide is not None and narrow is not None:
        loops["int8_pairs"] = _narrow_pairs(narrow, wide)
    if wide is not None:
        loops["int16"] = _pairs(wide)
    for name, feature, instruction, item_bytes in (
        ("bf16_tiles", "amx-bf16", "tdpbf16ps", 2),
        ("int8_tiles", "amx-int8", "tdpbusd", 1),
    ):
        if target.has("amx-tile", feature):
            operations = 2 * ROWS * ROWS * BYTES // item_bytes
            whole = emit.i32.vector(ROWS * BYTES // 4)
            loops[name] = Loop(whole, whole, lambda f, acc, x: acc, operations, Amx(instruction))
    return loops


def _fma(target: Target, element: Type) -> Loop:
    vector = element.vector(target.lanes(element.bits))
    return Loop(vector, vector, lambda f, acc, x: f.fma(acc, x, x), 2 * vector.lanes)


def _dot(dot: Instr) -> Loop:
    part = dot.operands[1]
    return Loop(dot.result, part, lambda f, acc, x: dot(f, acc, x, x), 2 * part.lanes)


def _pairs(pairs: Instr) -> Loop:
    # the product reads the sums, so that it is not moved out of the loop
    part = pairs.operands[0]
    return Loop(
        pairs.result,
        part,
        lambda f, acc, x: f.add(acc, pairs(f, f.bitcast(acc, part), x)),
        2 * part.lanes,
    )


def _narrow_pairs(narrow: Instr, wide: Instr) -> Loop:
    part = narrow.operands[0]

    def step(f: Kernel, acc: Value, x: Value) -> Value:
        ones = f.splat(f.const(emit.i16, 1), wide.operands[0].lanes)
        return f.add(acc, wide(f, narrow(f, f.bitcast(acc, part), x), ones))

    return Loop(wide.result, part, step, 2 * part.lanes)


def emit_loop(module: Module, name: str, loop: Loop) -> int:
    """Emit a kernel that runs a loop `turns` times; returns the steps of an iteration."""
    if loop.tiles is not None:
        return _emit_tiles(module, name, loop.tiles)
    # enough to hide the latency on any machine, and few enough to stay in registers
    count = 3 * module.target.vector_registers // 4
    with module.kernel(name, Signature(("data",), ("turns",))) as f:
        data, turns = f.args.pointer("data"), f.args.size("turns")
        factor = f.load(loop.part, data)
        start = [f.load(loop.acc, data, lane) for lane in range(count)]
        with f.loop(0, turns, carry=start) as nest:
            nest.next(*(loop.step(f, value, factor) for value in nest.carried))
        with f.if_(f.lt(turns, 0)):  # never taken; it keeps the results live
            for number, result in enumerate(nest.results):
                f.store(result, data, number * result.type.lanes)
    return count


def _emit_tiles(module: Module, name: str, tiles: Amx) -> int:
    """Four tiles of sums and two of each operand: all eight registers."""
    with module.kernel(name, Signature(("data",), ("turns",))) as f:
        data, turns = f.args.pointer("data"), f.args.size("turns")
        stride = f.index(BYTES)
        a, b = ([tiles.read(f, data, stride) for _ in range(2)] for _ in range(2))
        start = [value for _ in range(4) for value in tiles.zeros(f)]
        with f.loop(0, turns, carry=start) as nest:
            sums = zip(nest.carried, ((x, y) for x in a for y in b), strict=True)
            nest.next(*(tiles.dot(f, [total], *pair)[0] for total, pair in sums))
        with f.if_(f.lt(turns, 0)):
            for result in nest.results:
                tiles.write(f, [result], data, stride)
    return 4


_INTEGER = r"tdpb[su][su]d|\{?v?pdp\w+|v?pmadd(?:wd|ubsw)|[us]{1,2}dot"
_FLOAT = (
    r"tdp(?:bf16|fp16)ps|vdpbf16ps|bf(?:dot|mmla)|v?f[n]?madd\d*[ps][shd]|fmla|v?mulp[shd]|fmul"
)
_LINE = re.compile(rf"^\s+(?:\{{\w+\}}\s+)?({_INTEGER}|{_FLOAT})\b", re.MULTILINE)
_IS_INTEGER = re.compile(_INTEGER)
_FUSED = re.compile(r"^(vfn?madd)(?:132|213|231)")


def is_integer_product(instruction: str) -> bool:
    """Whether an instruction multiplies integers and adds products."""
    return bool(_IS_INTEGER.fullmatch(instruction))


def product_instruction(assembly: str) -> str:
    """The instruction that multiplies most often; an integer one, if there is any.

    Float multiplications of an integer kernel are its epilogue, and a vpmaddwd for each vpmaddubsw
    adds its results. The three operand orders of a fused multiply-add have one name. Empty if
    nothing is multiplied.
    """
    found = Counter(_FUSED.sub(r"\g<1>231", name) for name in _LINE.findall(assembly))
    integer = {name: count for name, count in found.items() if is_integer_product(name)}
    counts = integer or found
    return max(counts, key=lambda name: (counts[name], "ub" in name), default="")


@cache
def loop_instructions(target: Target) -> dict[str, str]:
    """The instruction in each loop's assembly, by the name of the loop."""
    found = {}
    for name, loop in product_loops(target).items():
        module = Module(target, name)
        emit_loop(module, name, loop)
        found[name] = product_instruction(jit.assembly(module.text(), target))
    return found
