"""How many sums a product holds in registers at a time, by target and columns."""

from __future__ import annotations

from dataclasses import dataclass

from bitwright.target import Target


@dataclass(frozen=True)
class Tile:
    """Sums held in registers: rows × (vectors · lanes)."""

    rows: int
    vectors: int
    lanes: int

    @property
    def columns(self) -> int:
        return self.vectors * self.lanes

    @property
    def heights(self) -> tuple[int, ...]:
        """Tile heights that are emitted: rows left over take the lowest that holds them."""
        found = [self.rows]
        while found[-1] > 1:
            found.append(found[-1] // 2)
        return tuple(reversed(found))


# rows × vectors: sums, the panel's vectors, a broadcast number (and a product, where multiplying
# and adding are two instructions) fit the registers
_TILES_32 = ((8, 3), (6, 4), (5, 5), (12, 2), (12, 1))
_TILES_32_UNFUSED = ((8, 2), (8, 1))
_TILES_16 = ((6, 2), (3, 3), (12, 1))
_TILES_16_UNFUSED = ((6, 2), (3, 3), (8, 1))
_TILES_16_TWO_OPERANDS = ((4, 2), (8, 1))
"""Where an instruction overwrites one of its operands, a product takes a copy as well."""


def best_tile(
    target: Target,
    columns: int = 0,
    fused: bool | None = None,
    extra: int = 0,
    unpacking: int = 0,
) -> Tile:
    """The tile for a target; for a known number of columns, the one that takes the least time.

    `fused` says whether adding a product is one instruction (as it is for f32 unless given),
    `extra` how many vectors of sums a row has beside those of its columns, `unpacking` how many
    instructions make a vector of the panel ready.
    """
    plain, unfused = (_TILES_32, _TILES_32_UNFUSED)
    if target.vector_registers < 32:
        plain, unfused = _TILES_16, _TILES_16_UNFUSED
        if target.is_x86 and not target.has("avx"):
            unfused = _TILES_16_TWO_OPERANDS
    choices = plain if fused or (fused is None and target.has_fma) else unfused
    lanes = target.lanes(32)

    def cost(choice: tuple[int, int]) -> float:
        rows, vectors = choice
        panels = -(-columns // ((vectors - extra) * lanes))
        return panels * step_cycles(rows, vectors, unpacking) / rows

    rows, vectors = min((c for c in choices if c[1] > extra), key=cost)
    return Tile(rows, vectors - extra, lanes)


def step_cycles(rows: int, vectors: int, unpacking: int = 0) -> float:
    """What a step of k takes, as measured: two sums a cycle and some waiting, or a load a cycle."""
    return max(1.17 * (rows + unpacking) * vectors / 2, 1.03 * (rows + vectors))
