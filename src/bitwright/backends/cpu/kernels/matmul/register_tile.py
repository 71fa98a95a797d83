"""The register tile of a product: how many sums it holds in registers, by target and columns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bitwright.target import Target


@dataclass(frozen=True)
class Tile:
    """The sums held in registers: rows × (vectors · lanes)."""

    rows: int
    vectors: int
    lanes: int

    @property
    def columns(self) -> int:
        return self.vectors * self.lanes

    @property
    def heights(self) -> tuple[int, ...]:
        """The tile heights that are emitted: remaining rows use the lowest that holds them."""
        found = [self.rows]
        while found[-1] > 1:
            found.append(found[-1] // 2)
        return tuple(reversed(found))


_Choices = tuple[tuple[int, int], ...]
# rows × vectors: the sums, the vectors of the panel, a broadcast element and, where multiply and
# add are two instructions, a product fit the registers
_TILES_32: _Choices = ((8, 3), (6, 4), (5, 5), (12, 2), (12, 1))
_TILES_32_UNFUSED: _Choices = ((8, 2), (8, 1))
_TILES_16 = ((6, 2), (3, 3), (12, 1))
_TILES_16_UNFUSED = ((6, 2), (3, 3), (8, 1))
_TILES_16_TWO_OPERANDS = ((4, 2), (8, 1))
"""For two-operand instructions, which overwrite an operand, so that a product needs a copy."""


def best_tile(
    target: Target, columns: int = 0, fused: bool | None = None, extra: int = 0, unpacking: int = 0
) -> Tile:
    """The register tile for a target; for a known number of columns, the fastest.

    `fused` says whether multiply-add is one instruction (by default, as for f32 on the target),
    `extra` counts the vectors of sums that a row has besides those of its columns, `unpacking` the
    instructions that unpack a vector of the panel.
    """
    static = [c for c in _static_choices(target, fused) if c[1] > extra]
    rows, vectors = min(static, key=_cost(target, columns, extra, unpacking))
    return Tile(rows, vectors - extra, target.lanes(32))


def candidate_tiles(
    target: Target, columns: int = 0, fused: bool | None = None, extra: int = 0, unpacking: int = 0
) -> list[Tile]:
    """The tiles that tuning measures: `best_tile` first, then others by their estimated cost.

    All tiles form each sum in the order of k, so they give the same bits.
    """
    best = best_tile(target, columns, fused, extra, unpacking)
    is_fused = fused or (fused is None and target.has_fma)
    registers, cost = target.vector_registers, _cost(target, columns, extra, unpacking)
    fitting = {
        (rows, vectors)
        for vectors in range(extra + 1, 7)
        for rows in range(1, registers)
        if rows * vectors + vectors + (1 if is_fused else 2) <= registers
    }
    fitting.update(c for c in _static_choices(target, fused) if c[1] > extra)
    limit = _WORTH_MEASURING * cost((best.rows, best.vectors + extra))
    others = sorted((c for c in fitting if cost(c) <= limit), key=lambda c: (cost(c), c))
    tiles = [Tile(rows, vectors - extra, best.lanes) for rows, vectors in others]
    return [best, *(tile for tile in tiles if tile != best)][: 1 + MOST_OTHERS]


_WORTH_MEASURING = 1.25
"""Tiles of a higher estimated cost than this times the best are not measured."""
MOST_OTHERS = 7
"""The most tiles that tuning measures besides the static choice."""


def _static_choices(target: Target, fused: bool | None) -> _Choices:
    plain, unfused = _TILES_32, _TILES_32_UNFUSED
    if target.vector_registers < 32:
        plain, unfused = _TILES_16, _TILES_16_UNFUSED
        if target.is_x86 and not target.has("avx"):
            unfused = _TILES_16_TWO_OPERANDS
    return plain if fused or (fused is None and target.has_fma) else unfused


def _cost(
    target: Target, columns: int, extra: int, unpacking: int
) -> Callable[[tuple[int, int]], float]:
    """Estimated cycles of rows × vectors of sums, per row and step of k, over all columns."""
    lanes = target.lanes(32)

    def cost(choice: tuple[int, int]) -> float:
        rows, vectors = choice
        panels = -(-columns // ((vectors - extra) * lanes))
        return panels * step_cycles(rows, vectors, unpacking) / rows

    return cost


def step_cycles(rows: int, vectors: int, unpacking: int = 0) -> float:
    """The measured cycles of a step of k: bound by two multiply-adds or one load per cycle."""
    return max(1.17 * (rows + unpacking) * vectors / 2, 1.03 * (rows + vectors))
