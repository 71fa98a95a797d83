"""One to a few rows times packed weights, as Triton text. The bytes of the weights bound the time.

    acc[m, n] = Σ_g (Σ_k x[m, g, k] q[n, g, k] - z[n, g] Σ_k x[m, g, k]) s[n, g]        k in group g

Two forms of the inner sum:

    integer   a kernel before quantizes x to 16 (or 8) bits per group, as two bytes h and l with
              x = (256 h + l) t[g]; `dp4a` multiplies four bytes of h, or l, with four weights.
              For 4-bit weights that is 7 (or 5) instructions for 8 weights. 16 bits keep more
              digits than f16 and bf16 have, relative to the largest value of 32.
    float     weights are unpacked to f32 and multiplied in f32; for f32 rows and float weights.

Programs take BN columns and one part of the groups; a second kernel adds the parts in order.
Inline PTX does not run in Triton's interpreter: `is_twin` writes the same sum in plain `tl`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import indent

from bitwright.backends.gpu.codegen.source import Config, Grid, cdiv
from bitwright.backends.gpu.kernels.weight_only.packing import GROUP
from bitwright.backends.gpu.lowering.context import Machine
from bitwright.ir.dtype import DType, f4e2m1, f8e4m3fn, f8e5m2, i8, u8

MOST_ROWS = 8

DP4A = """
@triton.jit
def bw_dp4a(a, b, c):
    # c + the sum of the products of four signed bytes
    return tl.inline_asm_elementwise(
        "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
    )
"""
DP4A += """
@triton.jit
def bw_dp4a_twin(a, b, c):
    first = ((a << 24) >> 24) * ((b << 24) >> 24) + ((a << 16) >> 24) * ((b << 16) >> 24)
    return c + first + ((a << 8) >> 24) * ((b << 8) >> 24) + (a >> 24) * (b >> 24)
"""
F4 = """
@triton.jit
def bw_f4(nibble):
    # e2m1: sign, two bits of exponent, one of mantissa; twice the magnitude is an integer
    exponent = (nibble >> 1) & 3
    mantissa = nibble & 1
    twice = tl.where(exponent == 0, mantissa, (2 + mantissa) << tl.maximum(exponent - 1, 0))
    return tl.where((nibble & 8) != 0, -twice, twice).to(tl.float32) * 0.5
"""


@dataclass(frozen=True)
class PackedProduct:
    """Facts of a product of few rows with packed weights."""

    kind: DType
    rows: int
    columns: int
    groups: int
    depth: int
    block: int
    offset: int
    has_zero: bool
    bits: int
    """Of quantized rows: 16 or 8; 0 for the float form."""
    is_twin: bool = False

    @property
    def is_narrow(self) -> bool:
        return self.kind.bits <= 4

    @property
    def per_group(self) -> int:
        return GROUP // 8 if self.is_narrow else GROUP // 4

    @property
    def helpers(self) -> str:
        if self.bits:
            return DP4A
        return F4 if self.kind == f4e2m1 else ""

    @property
    def dp4a(self) -> str:
        return "bw_dp4a_twin" if self.is_twin else "bw_dp4a"

    @property
    def tile_rows(self) -> int:
        """The rows of `acc`, a power of two."""
        return 1 << (self.rows - 1).bit_length()


def quantize_body(facts: PackedProduct) -> str:
    """Rows as words of four bytes, with a scale and the sum of each group.

    Element 4w + i of a group is byte i of word w; even words of narrow weights come first, then odd
    ones, as the two halves of the weights' words take them.
    """
    highest = 32512.0 if facts.bits == 16 else 127.0
    order = "(w % 2) * 4 + w // 2" if facts.is_narrow else "w"
    split = (
        """
high = (q + 128) >> 8
low = q - high * 256
"""
        if facts.bits == 16
        else "high = q\n"
    )
    store = f"tl.store(x_high + word_at, {_bytes_to_word('high')}, mask=here)\n"
    if facts.bits == 16:
        store += f"tl.store(x_low + word_at, {_bytes_to_word('low')}, mask=here)\n"
    return f"""
K: tl.constexpr = {facts.depth}
G: tl.constexpr = {facts.groups}
g = tl.program_id(0) * BG + tl.arange(0, BG)
m = tl.program_id(1)
w = tl.arange(0, 8)
i = tl.arange(0, 4)
at = g[:, None, None] * {GROUP} + w[None, :, None] * 4 + i[None, None, :]
inside = (at < K) & (g < G)[:, None, None]
v = tl.load(x + m.to(tl.int64) * x_row + at, mask=inside, other=0.0).to(tl.float32)
largest = tl.max(tl.max(tl.abs(v), 2), 1)
scale = tl.where(largest > 0, largest * (1.0 / {highest}), 1.0)
q = bw_round_small(tl.div_rn(v, tl.broadcast_to(scale[:, None, None], (BG, 8, 4)))).to(tl.int32)
q = tl.minimum(tl.maximum(q, -{int(highest)}), {int(highest)})
{split.strip()}
here = (g < G)[:, None] & (w < 8)[None, :]
word_at = (m * G + g)[:, None] * 8 + ({order})[None, :]
{store.strip()}
tl.store(x_scale + m * G + g, scale, mask=g < G)
tl.store(x_sum + m * G + g, tl.sum(tl.sum(q, 2), 1), mask=g < G)
"""


def product_body(facts: PackedProduct, tail: str, parts: int) -> str:
    """The product; `tail` runs on `acc` [rows, BN] where there is one part."""
    w = facts.per_group
    lines = [
        "g = (part * STEPS + step) * BG + tl.arange(0, BG)",
        "inside = (columns < N)[:, None] & (g < G)[None, :]",
        f"at = q + columns[:, None, None].to(tl.int64) * (G * {w}) + g[None, :, None] * {w}",
        "word = tl.load(at + j[None, None, :], mask=inside[:, :, None], other=0)",
        f"block = columns[:, None].to(tl.int64) * BLOCKS + (g * {GROUP} // BLOCK)[None, :]",
        "s = tl.load(scale + block, mask=inside, other=0.0).to(tl.float32)",
    ]
    if facts.has_zero:
        lines.append("z = tl.load(zero + block, mask=inside, other=0)")
    lines += _integer_rows(facts) if facts.bits else _float_rows(facts)
    zeros = "\n".join(f"acc{m} = tl.zeros((BN, BG), tl.float32)" for m in range(facts.rows))
    sums = "\n".join(
        f"acc = tl.where(rows[:, None] == {m}, tl.sum(acc{m}, 1)[None, :], acc)"
        for m in range(facts.rows)
    )
    if parts > 1:
        tail = (
            "tl.store(partial + (part * M + row) * N + column, acc, mask=(row < M) & (column < N))"
        )
    return f"""
N: tl.constexpr = {facts.columns}
K: tl.constexpr = {facts.depth}
G: tl.constexpr = {facts.groups}
BLOCK: tl.constexpr = {facts.block}
BLOCKS: tl.constexpr = (K + BLOCK - 1) // BLOCK
M: tl.constexpr = {facts.rows}
STEPS: tl.constexpr = (G + BG * PARTS - 1) // (BG * PARTS)
columns = tl.program_id(0) * BN + tl.arange(0, BN)
part = tl.program_id(1)
j = tl.arange(0, {w})
{zeros}
for step in tl.range(STEPS, num_stages=STAGES):
{indent(chr(10).join(lines), "    ")}
rows = tl.arange(0, {facts.tile_rows})
acc = tl.zeros(({facts.tile_rows}, BN), tl.float32)
{sums}
row = rows[:, None].to(tl.int64)
column = columns[None, :]
{tail}
"""


def _integer_rows(facts: PackedProduct) -> list[str]:
    """Statements that add a step to the sums of every row, from quantized rows."""
    lines = [f"nothing = tl.zeros((BN, BG, {facts.per_group}), tl.int32)"]
    if facts.is_narrow:
        lines += ["even = word & 0x0F0F0F0F", "odd = (word >> 4) & 0x0F0F0F0F"]
    zero, dot = _zero_text(facts), facts.dp4a
    for m in range(facts.rows):
        first = f"({m} * G + g)[:, None] * 8 + j[None, :]"
        names = ["high"] + ["low"] * (facts.bits == 16)
        for name in names:
            lines.append(f"x_at = x_{name} + {first}")
            lines.append(_word("a", 0))
            if facts.is_narrow:
                lines.append(_word("b", 4))
                lines.append(f"{name} = tl.sum({dot}(odd, b, {dot}(even, a, nothing)), 2)")
            else:
                lines.append(f"{name} = tl.sum({dot}(word, a, nothing), 2)")
        lines.append("total = high * 256 + low" if facts.bits == 16 else "total = high")
        lines.append(f"x_total = tl.load(x_sum + {m} * G + g, mask=g < G, other=0)")
        lines.append(f"t = tl.load(x_scale + {m} * G + g, mask=g < G, other=0.0)")
        if zero:
            lines.append(f"total = total - ({zero}) * x_total[None, :]")
        lines.append(f"acc{m} += total.to(tl.float32) * (s * t[None, :])")
    return lines


def _float_rows(facts: PackedProduct) -> list[str]:
    """Statements that add a step to the sums of every row, in f32."""
    zero = _zero_text(facts).replace(".to(tl.int32)", ".to(tl.float32)")
    count = 8 if facts.is_narrow else 4
    lines = []
    for m in range(facts.rows):
        lines.append(f"terms{m} = tl.zeros((BN, BG, {facts.per_group}), tl.float32)")
    for place in range(count):
        lines.append(f"v = {_decoded(facts, place)}")
        if zero:
            lines.append(f"v = v - ({zero})[:, :, None]" if "z" in zero else f"v = v - {zero}")
        for m in range(facts.rows):
            lines.append(f"k = g[:, None] * {GROUP} + j[None, :] * {count} + {place}")
            load = f"tl.load(x + {m} * x_row + k, mask=k < K, other=0.0).to(tl.float32)"
            lines.append(f"terms{m} += v * {load}[None, :, :]")
    lines += [f"acc{m} += tl.sum(terms{m}, 2) * s" for m in range(facts.rows)]
    return lines


def _decoded(facts: PackedProduct, place: int) -> str:
    """The weight at a place of every word, in f32."""
    if facts.is_narrow:
        shift = 8 * place if place < 4 else 8 * (place - 4) + 4
        nibble = f"((word >> {shift}) & 15)"
        return f"bw_f4({nibble})" if facts.kind == f4e2m1 else f"{nibble}.to(tl.float32)"
    if facts.kind in (i8, u8):
        return f"((word << {24 - 8 * place}) >> 24).to(tl.float32)"
    type_ = {f8e4m3fn: "tl.float8e4nv", f8e5m2: "tl.float8e5"}[facts.kind]
    byte = f"((word >> {8 * place}) & 255).to(tl.uint8)"
    return f"{byte}.to({type_}, bitcast=True).to(tl.float32)"


def _zero_text(facts: PackedProduct) -> str:
    """What is subtracted from a stored weight; "" for nothing."""
    if facts.has_zero:
        return f"z.to(tl.int32) + {facts.offset}" if facts.offset else "z.to(tl.int32)"
    return str(facts.offset) if facts.offset else ""


def _word(name: str, more: int) -> str:
    where = f"x_at + {more}" if more else "x_at"
    load = f"tl.load({where}, mask=(g < G)[:, None] & (j >= 0)[None, :], other=0)"
    shape = "(BN, BG, j.shape[0])"
    return f"{name} = tl.broadcast_to({load}[None, :, :], {shape})"


def _bytes_to_word(name: str) -> str:
    return f"tl.sum(({name} & 255) << (i * 8)[None, None, :], 2)"


def quantize_configs() -> tuple[Config, ...]:
    return tuple(Config({"BG": groups}, 4, 1) for groups in (16, 32, 8))


CANDIDATES = (
    # columns, groups, warps, stages
    (8, 64, 4, 2),
    (4, 64, 4, 2),
    (16, 32, 4, 2),
    (4, 128, 4, 2),
    (2, 128, 4, 2),
    (8, 32, 2, 3),
    (16, 64, 8, 2),
    (1, 256, 4, 2),
)


def configs(machine: Machine, facts: PackedProduct, parts: int) -> tuple[Config, ...]:
    """Candidates; first those that give every multiprocessor work and waste few groups."""

    def cost(candidate: Sequence[int]) -> tuple[float, int]:
        columns, groups, _warps, _stages = candidate
        programs = cdiv(facts.columns, columns) * parts
        steps = cdiv(facts.groups, groups * parts)
        waste = steps * groups * parts / facts.groups
        waves = cdiv(programs, 4 * machine.multiprocessors) * 4 * machine.multiprocessors / programs
        return waste * max(waves, 1.0), CANDIDATES.index(tuple(candidate))

    return tuple(
        Config({"BN": columns, "BG": groups, "PARTS": parts, "STAGES": stages}, warps, stages)
        for columns, groups, warps, stages in sorted(CANDIDATES, key=cost)
    )


def parts_of(machine: Machine, facts: PackedProduct) -> int:
    """Into how many parts the groups are split: 1 where the columns alone fill the device."""
    programs = cdiv(facts.columns, 4)
    steps = facts.groups // 32
    return max(min(cdiv(2 * machine.multiprocessors, programs), steps, 16), 1)


def grid(facts: PackedProduct) -> Grid:
    def programs(size: Mapping[str, int]) -> Sequence[int]:
        return cdiv(facts.columns, size["BN"]), size["PARTS"]

    return programs
