"""Rows of f16 as planes of bf16, for products in tiles (`kernels.tiles.SplitDots`).

    y[0] = bf16(x)    y[1] = x - y[0], exactly    y[2] = y[0]

where 0 stands in y[1] and y[2] for what is not finite. A bf16 has 8 bits of an f16's 11 and a wider
range, so the rest has 3 at most and no result is subnormal.
"""

from __future__ import annotations

from bitwright.backends.cpu.emit import Kernel, Module, Signature, Value, bf16, f16, f32

PLANES = 3


def emit_split(module: Module, name: str) -> Signature:
    """Rows lie `x_stride` numbers apart in x, behind each other in y; `plane` counts numbers."""
    signature = Signature(("x", "y"), ("rows", "columns", "x_stride", "plane"))
    with module.kernel(name, signature) as f, f.subnormals_as_zeros():
        columns, lanes = f.args.size("columns"), f.target.lanes(32)
        begin, end = f.share(f.args.size("rows"))
        with f.loop(begin, end) as loop:
            x = f.gep(f16, f.args.pointer("x"), loop.index * f.args.size("x_stride"))
            y = f.gep(bf16, f.args.pointer("y"), loop.index * columns)

            def part(column: Value, mask: Value | None, x: Value = x, y: Value = y) -> None:
                wide = f.convert(f.load(f16.vector(lanes), x, column, mask=mask), f32)
                for number, plane in enumerate(_planes(f, wide)):
                    at = f.args.size("plane") * number + column
                    f.store(plane, y, at, mask=mask)

            f.vectors(0, columns, lanes, part)
    return signature


def _planes(f: Kernel, x: Value) -> list[Value]:
    high = f.convert(x, bf16)
    back = f.convert(high, f32)
    is_finite = f.lt(f.abs(x), float("inf"))
    rest = f.select(is_finite, x - back, 0.0)
    again = f.select(is_finite, back, 0.0)
    return [high, f.convert(rest, bf16), f.convert(again, bf16)]
