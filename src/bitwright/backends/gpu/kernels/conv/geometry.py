"""Windows of a convolution as Triton text: which pixels of the image a row of the product reads.

Images are dense, [N, spatial..., C]. A row of the product is a pixel of the result; `window_lines`
computes the first pixel of its window on each axis, and `tap_lines` where a tap of the window lies
and whether it is inside the image.
"""

from __future__ import annotations

from dataclasses import dataclass

from bitwright.ir.dim import Size


@dataclass(frozen=True)
class Geometry:
    sizes: tuple[Size, ...]
    """Of the image, outermost first."""
    counts: tuple[Size, ...]
    """Of the result."""
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    begins: tuple[int, ...]
    ends: tuple[int, ...]
    dilations: tuple[int, ...]
    channels: int
    groups: int
    is_padded: bool

    @property
    def rank(self) -> int:
        return len(self.kernel)

    @property
    def taps(self) -> int:
        found = 1
        for size in self.kernel:
            found *= size
        return found

    @property
    def per_group(self) -> int:
        return self.channels // self.groups

    @property
    def is_pointwise(self) -> bool:
        """Whether windows are single pixels in the order of the image."""
        return self.taps == 1 and set(self.strides) == {1} and not self.is_padded

    @property
    def head(self) -> list[str]:
        """Known sizes as constants of the kernel."""
        lines = [f"C: tl.constexpr = {self.channels}", f"CG: tl.constexpr = {self.per_group}"]
        lines += [f"TAPS: tl.constexpr = {self.taps}"]
        for name, size in self._named():
            if isinstance(size, int):
                lines.append(f"{name}: tl.constexpr = {size}")
        return lines

    @property
    def values(self) -> dict[str, Size]:
        """Sizes that are known at run time only."""
        return {name: size for name, size in self._named() if not isinstance(size, int)}

    def _named(self) -> list[tuple[str, Size]]:
        sizes = [(f"S{axis}", size) for axis, size in enumerate(self.sizes)]
        return [*sizes, *((f"O{axis}", size) for axis, size in enumerate(self.counts))]

    def window_lines(self, row: str) -> list[str]:
        """`i0`, `i1`, ...: the first pixel of the window of a row; `image`: the pixel offset."""
        lines = [f"left = {row}"]
        for axis in reversed(range(self.rank)):
            begin = f" - {self.begins[axis]}" if self.begins[axis] else ""
            lines.append(f"i{axis} = (left % O{axis}) * {self.strides[axis]}{begin}")
            lines.append(f"left = left // O{axis}")
        lines.append("image = left.to(tl.int64)")
        for axis in range(self.rank):
            lines.append(f"image = image * S{axis} + i{axis}")
        return lines

    def tap_lines(self, tap: str) -> list[str]:
        """`t0`, `t1`, ...: the offsets of a tap, and `shift`, in pixels."""
        lines = [f"rest = {tap}"]
        for axis in reversed(range(self.rank)):
            lines.append(f"t{axis} = (rest % {self.kernel[axis]}) * {self.dilations[axis]}")
            lines.append(f"rest = rest // {self.kernel[axis]}")
        lines.append("shift = t0")
        lines += [f"shift = shift * S{axis} + t{axis}" for axis in range(1, self.rank)]
        return lines

    def inside(self, rows: str = "", taps: str = "") -> str:
        """Whether a tap is inside of the image; "" where all are."""
        if not self.is_padded:
            return ""
        parts = []
        for axis in range(self.rank):
            place = f"(i{axis}{rows} + t{axis}{taps})"
            parts.append(f"({place} >= 0) & ({place} < S{axis})")
        return " & ".join(parts)
