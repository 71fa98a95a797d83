"""Pad and roll: one program per BLOCK of the result, which is contiguous.

place = index - begin on each axis; of the source axis of size m:
constant: the value where out of range   edge: clamped   wrap: modulo   reflect: mirrored
"""

from __future__ import annotations

from bitwright.backends.gpu.codegen.source import KernelSource
from bitwright.backends.gpu.kernels.elementwise.elementwise import FLAT, flat, flat_grid
from bitwright.ir.dtype import DType

_PLACES = {
    "constant": "",
    "edge": "p{a} = tl.minimum(tl.maximum(p{a}, 0), m{a} - 1)",
    "wrap": "p{a} = ((p{a} % m{a}) + m{a}) % m{a}",
    "reflect": (
        "w{a} = tl.maximum(2 * (m{a} - 1), 1)\n"
        "p{a} = ((p{a} % w{a}) + w{a}) % w{a}\n"
        "p{a} = tl.where(p{a} < m{a}, p{a}, w{a} - p{a})"
    ),
}


def unravel(rank: int, size: str = "n") -> list[str]:
    """Statements that compute the index j of every axis from `i`."""
    lines = ["left = i"]
    for axis in range(rank - 1, 0, -1):
        lines += [f"j{axis} = left % {size}{axis}", f"left = left // {size}{axis}"]
    return [*lines, "j0 = left"]


def window_source(mode: str, rank: int, element: DType) -> KernelSource:
    """Sizes: n of the result, m of the source, begins b, strides x of the source."""
    lines = [*flat().split("\n"), *unravel(rank)]
    inside, terms = ["mask"], []
    for axis in range(rank):
        lines.append(f"p{axis} = j{axis} - b{axis}")
        if mode == "constant":
            inside.append(f"(p{axis} >= 0) & (p{axis} < m{axis})")
        else:
            lines += _PLACES[mode].format(a=axis).split("\n")
        terms.append(f"p{axis} * x{axis}")
    lines.append(f"inside = {' & '.join(inside)}")
    lines.append(f"found = tl.load(x + ({' + '.join(terms)}), inside, other=0)")
    lines.append("found = tl.where(inside, found, tl.load(value))")
    lines.append("tl.store(y + i, found, mask)")
    names = [f"{letter}{axis}" for letter in "nmbx" for axis in range(rank)]
    return KernelSource(
        f"pad_{mode}_{element.bits}",
        "\n".join(lines),
        {"x": element, "value": element, "y": element},
        (*names, "count"),
        FLAT,
        flat_grid,
    )
