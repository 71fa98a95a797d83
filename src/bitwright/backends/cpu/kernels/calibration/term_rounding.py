"""Sequential rounding of weights with error feedback (GPTQ).

    for k:   c[k] = clamp(rne(w[k] / s[k]), lowest, highest)
             w[k] = (w[k] - c[k] s[k]) / U[k, k]
             w[j] -= U[k, j] w[k]                                for all j > k

on many columns in parallel, with the same bits as the numpy implementation; used by `quant`. s is
the same for all k if its stride is 0.
"""

from __future__ import annotations

from bitwright.backends.cpu.codegen.emit import Module, Value, f32, i64, ptr
from bitwright.target import Target

NAME = "round_terms_f32"
PARAMS = (
    *(("w", ptr), ("s", ptr), ("u", ptr), ("c", ptr)),
    *(("terms", i64), ("columns", i64), ("s_stride", i64), ("u_stride", i64)),
    *(("lowest", i64), ("highest", i64)),
)


def term_rounding_text(target: Target) -> str:
    """The module's text. Strides are in elements, from one row to the next."""
    module = Module(target, "term_rounding")
    with module.function(NAME, params=PARAMS, internal=False) as f:
        w, s, u, c, terms, columns, s_stride, u_stride, lowest, highest = f.params
        lanes = f.target.lanes(32)
        low, high = (f.splat(f.convert(end, f32), lanes) for end in (lowest, highest))

        def vector(pointer: Value, at: Value, mask: Value | None) -> Value:
            return f.load(f32.vector(lanes), pointer, at, mask=mask, align=4)

        def columns_at(column: Value, mask: Value | None) -> None:
            with f.loop(0, terms) as loop:
                k = loop.index
                at = k * columns + column
                weight, step = vector(w, at, mask), vector(s, k * s_stride + column, mask)
                ratio = f.round(weight / step)
                q = f.quick_min(f.quick_max(ratio, low), high)
                f.store(q, c, at, mask=mask, align=4)
                own = f.splat(f.load(f32, u, k * u_stride + k), lanes)
                error = (weight - q * step) / own
                f.store(error, w, at, mask=mask, align=4)
                with f.loop(k + 1, terms) as behind:
                    j = behind.index
                    share = f.splat(f.load(f32, u, k * u_stride + j), lanes)
                    there = vector(w, j * columns + column, mask) - share * error
                    f.store(there, w, j * columns + column, mask=mask, align=4)

        f.vectors(0, columns, lanes, columns_at)
    return module.text()
