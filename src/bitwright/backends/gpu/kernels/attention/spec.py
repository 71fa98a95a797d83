"""What an attention kernel is generated from, and the pieces of text that its forms share.

Scores are multiplied by log2(e), so that the softmax uses 2^x:  p = 2^(s log2(e) - top).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bitwright.backends.gpu.lowering.operands import Tail
from bitwright.ir.dim import Size
from bitwright.ir.dtype import DType, bool_, f32
from bitwright.lir.buffer import View

LOG2_E = 1.4426950408889634


def padded(count: int) -> int:
    """The power of two from 16 on that holds a count."""
    return max(16, 1 << max(count - 1, 0).bit_length())


@dataclass(frozen=True)
class Attention:
    element: DType
    features: int
    values: int
    """Features of v."""
    scale: float
    causal: bool
    window: int | None
    window_right: int | None
    softcap: float
    views: dict[str, View]
    """q, k, v and those of mask, past_k, past_v, lengths that exist."""
    sizes: dict[str, Size]
    tail: Tail
    is_int8: bool = False
    """The op quantizes its operands to 8 bits; tf32 products are at least as accurate."""

    @property
    def has_past(self) -> bool:
        return "past_k" in self.views

    @property
    def operands(self) -> dict[str, DType]:
        return {name: view.dtype for name, view in self.views.items()}

    @property
    def dot(self) -> str:
        """The options of a product: three tf32 products for f32, one in place of int8."""
        if self.element != f32:
            return ""
        return f', input_precision="{"tf32" if self.is_int8 else "tf32x3"}"'

    @property
    def type_name(self) -> str:
        return {"f32": "tl.float32", "f16": "tl.float16", "bf16": "tl.bfloat16"}[self.element.name]

    @property
    def is_bounded(self) -> bool:
        """Whether keys can be hidden by their position."""
        bounds = self.causal, self.window is not None, self.window_right is not None
        return any(bounds) or "lengths" in self.views

    @property
    def whole_block(self) -> int:
        """The keys per block where every query sees all keys, a known multiple of it; else 0."""
        total = self.sizes["total"]
        is_plain = not (self.is_bounded or self.has_past or "mask" in self.views or self.softcap)
        if not is_plain or not isinstance(total, int) or self.scale <= 0:
            return 0
        widest = max(padded(self.features), padded(self.values))
        blocks = (128, 64) if self.element != f32 and widest <= 64 else (64, 32)
        return next((n for n in blocks if total % n == 0 and total), 0) if widest <= 128 else 0

    def whole_lines(self) -> list[str]:
        """Statements that compute `acc` and `sums` from all keys, without masks.

        The scale is positive, so that it joins the exponent: 2^(c s - c max(s)).
        """
        scale, total = self.scale * LOG2_E, self.sizes["total"]
        wide = "" if padded(self.features) == self.features else f", d < {self.features}"
        deep = "" if padded(self.values) == self.values else f", dv < {self.values}"
        lines = [
            f"kt = tl.load(k_row + key.to(tl.int64) * k_s2 + d{wide and wide + ', other=0.0'})",
            "values = tl.load(v_row + down.to(tl.int64) * v_s2 + dv"
            f"{deep and deep + ', other=0.0'})",
            f"s = tl.dot(qt, kt{self.dot})",
        ]
        rows = [f"{n}_row = {n} + b * {n}_s0 + kv * {n}_s1" for n in self.key_names]
        first = "tl.arange(0, BN)"
        if total == self.whole_block:
            return [
                *rows,
                f"key, down = {first}[None, :], {first}[:, None]",
                *lines,
                f"p = tl.exp2(s * {scale!r} - (tl.max(s, axis=1) * {scale!r})[:, None])",
                "sums = tl.sum(p, axis=1)",
                f"acc = tl.dot(p.to({self.type_name}), values{self.dot})",
            ]
        inside = [
            f"key, down = start + {first}[None, :], start + {first}[:, None]",
            *lines,
            f"higher = tl.maximum(top, tl.max(s, axis=1) * {scale!r})",
            f"p = tl.exp2(s * {scale!r} - higher[:, None])",
            "shrink = tl.exp2(top - higher)",
            "sums = sums * shrink + tl.sum(p, axis=1)",
            "top = higher",
            f"acc = tl.dot(p.to({self.type_name}), values, acc * shrink[:, None]{self.dot})",
        ]
        return [
            *rows,
            f"for start in range(0, {total}, BN):",
            *(f"    {line}" for line in inside),
        ]

    def range_lines(self, first: str, last: str) -> list[str]:
        """Statements for `low` and `high`, the keys that positions first..last may see."""
        lines = ["low = tl.full([], 0, tl.int32)", "high = tl.cast(total, tl.int32)"]
        if "lengths" in self.views:
            lines.append("high = tl.minimum(high, valid)")
        if self.causal:
            lines.append(f"high = tl.minimum(high, {last} + 1)")
        if self.window_right is not None:
            lines.append(f"high = tl.minimum(high, {last} + {self.window_right + 1})")
        if self.window is not None:
            lines.append(f"low = tl.maximum(low, {first} - {self.window - 1})")
        return lines

    def offset_lines(self) -> list[str]:
        """Statements for `before`, the position of the first query, and `valid`."""
        if "lengths" not in self.views:
            return ["before = tl.cast(offset, tl.int32)"]
        return [
            "valid = tl.load(lengths + b).to(tl.int32)",
            "before = valid - queries",
        ]

    def score_lines(self, head: str, query: str) -> list[str]:
        """From `s`, products of tile rows and keys, to masked scores times log2(e).

        `position` has the positions of the rows, `key` those of the columns.
        """
        number = self.scale * (1.0 if self.softcap > 0 or "mask" in self.views else LOG2_E)
        lines = [f"s = s * {number!r}"]
        if self.softcap > 0:
            lines.append(f"s = {self.softcap!r} * bw_tanh(s / {self.softcap!r})")
        seen = []
        if "mask" in self.views:
            where = f"mask + b * mask_s0 + {head} * mask_s1 + {query} * mask_s2 + key * mask_s3"
            here = "(key < limit) & row_ok"
            if self.views["mask"].dtype == bool_:
                lines.append(f"m_in = tl.load({where}, {here}, other=0)")
                seen.append("(m_in != 0)")
            else:
                lines.append(
                    f"m_in = tl.load({where}, {here}, other=0).to(tl.float32)",
                )
                lines.append('s = s + tl.where(key < limit, m_in, float("-inf"))')
        if self.softcap > 0 or "mask" in self.views:
            lines.append(f"s = s * {LOG2_E!r}")
        if self.causal:
            seen.append("(key <= position)")
        if self.window is not None:
            seen.append(f"(key > position - {self.window})")
        if self.window_right is not None:
            seen.append(f"(key <= position + {self.window_right})")
        seen.append("(key < stop)")
        return [*lines, f's = tl.where({" & ".join(seen)}, s, float("-inf"))']

    def softmax_lines(self) -> list[str]:
        """Statements that add a block of keys to `top`, `sums` and `acc`."""
        return [
            "higher = tl.maximum(top, tl.max(s, axis=1))",
            'safe = tl.where(higher == float("-inf"), 0.0, higher)',
            "p = tl.exp2(s - safe[:, None])",
            "shrink = tl.exp2(top - safe)",
            "sums = sums * shrink + tl.sum(p, axis=1)",
            "top = higher",
            f"acc = tl.dot(p.to({self.type_name}), values, acc * shrink[:, None]{self.dot})",
        ]

    def loop_lines(
        self, keys: str, values: str, base: str, bounds: tuple[str, str], lines: Sequence[str]
    ) -> list[str]:
        """A loop over blocks of the keys of one operand; `base` is its first key.

        `lines` compute from the tiles `kt` [features, keys] and `values` [keys, features].
        """
        mask_d = "" if padded(self.features) == self.features else f" & (d < {self.features})"
        mask_v = "" if padded(self.values) == self.values else f" & (dv < {self.values})"
        begin, stop = bounds
        inside = [
            "key = start + tl.arange(0, BN)[None, :]",
            f"at = (key - {base}).to(tl.int64)",
            f"kt = tl.load({keys}_row + at * {keys}_s2 + d, (key < stop){mask_d}, other=0.0)",
            "down = start + tl.arange(0, BN)[:, None]",
            f"at_v = (down - {base}).to(tl.int64)",
            f"values = tl.load({values}_row + at_v * {values}_s2 + dv, (down < stop){mask_v}, "
            "other=0.0)",
            *lines,
        ]
        return [
            f"stop = {stop}",
            f"for start in range({begin}, stop, BN):",
            *(f"    {line}" for line in inside),
        ]

    def key_loops(self, lines: Sequence[str], low: str = "low", high: str = "high") -> list[str]:
        """Loops over the past and the new keys in low..high."""
        rows = [f"{n}_row = {n} + b * {n}_s0 + kv * {n}_s1" for n in self.key_names]
        if not self.has_past:
            own = self.loop_lines("k", "v", "0", (low, high), lines)
            return [*rows, *own]
        past = self.loop_lines("past_k", "past_v", "0", (low, f"tl.minimum({high}, past)"), lines)
        new = self.loop_lines("k", "v", "past", (f"tl.maximum({low}, past)", high), lines)
        return [*rows, *past, *new]

    @property
    def key_names(self) -> tuple[str, ...]:
        return ("k", "v", "past_k", "past_v") if self.has_past else ("k", "v")

    @property
    def stride_sizes(self) -> dict[str, Size]:
        """Strides of the operands' first three axes."""
        return {
            f"{name}_s{axis}": self.views[name].strides[axis]
            for name in ("q", *self.key_names)
            for axis in range(3)
        } | (
            {f"mask_s{axis}": s for axis, s in enumerate(self.views["mask"].strides)}
            if "mask" in self.views
            else {}
        )
