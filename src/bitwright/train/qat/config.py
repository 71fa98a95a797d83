"""QatConfig: what `bw.prepare_qat` does with weights and activations.

bw.QatConfig(weight_bits=4)
bw.QatConfig(weight_bits="ternary", scale_mode="per_batch", layers={"head": 8})
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bitwright.errors import TrainingError
from bitwright.ir.quant_types import Granularity, PerAxis, PerGroup, PerTensor
from bitwright.ops.quant.fake_quantize import STRAIGHT_THROUGH

Bits = int | str
WEIGHT_RANGES: dict[Bits, tuple[int, int]] = {
    8: (-127, 127),
    4: (-8, 7),
    2: (-2, 1),
    "ternary": (-1, 1),
    "binary": (-1, 1),
}
"""The smallest and largest quantized weight. 8 bits are symmetric, as in `bw.quantize`."""
ACTIVATION_BITS = (8, 4)
SCALE_MODES = ("learned", "fixed", "moving_average", "per_batch")
NARROW = (4, 2, "ternary", "binary")
"""Widths at which the first and last layer stay at 8 bits unless asked otherwise."""


@dataclass(frozen=True)
class QatConfig:
    """Widths, scales and gradients of training through quantization."""

    weight_bits: Bits | None = None
    """8, 4, 2, "ternary" or "binary"; None keeps the width that the quantized model has."""
    activation_bits: int | None = None
    """8 or 4; None keeps the width that the quantized model has."""
    weight_granularity: Granularity | None = None
    """PerAxis(0), PerTensor() or PerGroup(size); None keeps that of the quantized model."""
    activations: str = "static"
    """Ranges for a float model: static, dynamic or auto, as in `bw.QuantConfig`."""
    scale_mode: str = "learned"
    """learned: trained with the weights (LSQ). fixed: as found. moving_average: of the ranges seen
    in the first steps, then frozen. per_batch: from the weights or activations of the step;
    activations then have dynamic ranges in the deployed model too."""
    activation_scale_mode: str | None = None
    """The same for activations; None means `scale_mode`."""
    ste: str = "clipped"
    """The straight-through gradient: identity, clipped, tanh or hard_tanh."""
    ends_in_8_bits: bool | None = None
    """Whether the first and last layer keep 8 bits; None means for 4 bits and below."""
    layers: Mapping[str, Bits] = field(default_factory=dict)
    """Weight bits by pattern of layer or weight; they override `weight_bits`."""
    reestimate_batch_norm: bool = False
    """Whether a float model gets new statistics of batch norm from the data before folding."""
    observer_steps: int = 100
    """Steps after which moving averages are frozen."""
    momentum: float = 0.1
    """The weight of a new range in a moving average."""

    def __post_init__(self) -> None:
        for what, found, allowed in (
            ("weight_bits", self.weight_bits, (None, *WEIGHT_RANGES)),
            ("activation_bits", self.activation_bits, (None, *ACTIVATION_BITS)),
            ("activations", self.activations, ("static", "dynamic", "auto")),
            ("scale_mode", self.scale_mode, SCALE_MODES),
            ("activation_scale_mode", self.activation_scale_mode, (None, *SCALE_MODES)),
            ("ste", self.ste, STRAIGHT_THROUGH),
            *(("weight_bits", bits, tuple(WEIGHT_RANGES)) for bits in self.layers.values()),
        ):
            if isinstance(found, bool) or found not in allowed:
                _raise(what, found, " or ".join(map(repr, allowed)))
        if self.weight_granularity not in (None, PerTensor(), PerAxis(0)) and not isinstance(
            self.weight_granularity, PerGroup
        ):
            expected = "PerAxis(0), PerTensor() or PerGroup(size)"
            _raise("weight_granularity", self.weight_granularity, expected)
        if self.observer_steps < 0:
            _raise("observer_steps", self.observer_steps, "0 or more")
        if not 0 < self.momentum <= 1:
            _raise("momentum", self.momentum, "above 0, at most 1")

    @property
    def activation_mode(self) -> str:
        return self.activation_scale_mode or self.scale_mode

    @property
    def keeps_ends(self) -> bool:
        """Whether the first and last layer stay at 8 bits."""
        if self.ends_in_8_bits is None:
            return self.weight_bits in NARROW
        return self.ends_in_8_bits


def _raise(what: str, found: Any, expected: str) -> None:
    raise TrainingError(f"QatConfig: {what} is not supported", expected=expected, found=repr(found))
