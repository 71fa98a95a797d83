"""QatModel: the training form of a quantized model, for `bw.Trainer` and `bw.convert_qat`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bitwright.ir.graph import Graph
from bitwright.passes.expand_fake_quantize import expand_fake_quantize
from bitwright.passes.manager import Pass
from bitwright.train.qat.config import QatConfig

if TYPE_CHECKING:  # it imports the whole of quantization
    from bitwright.quant.model.report import QuantizationReport

FACTOR = ".scale_factor"
"""The end of the name of a learned factor of scales."""


@dataclass(frozen=True, repr=False)
class QatModel:
    """A model with fake quantization: weights, biases and learned scales are parameters."""

    graph: Graph
    config: QatConfig
    report: QuantizationReport | None = None
    """Of the quantization that training starts from."""
    consumer: str = "any"

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The passes that make a training step run the deployed integer ops."""
        return (expand_fake_quantize,)

    @property
    def no_decay(self) -> tuple[str, ...]:
        """Patterns of parameters that weight decay must leave out: learned scales."""
        is_learned = any(value.name.endswith(FACTOR) for value in self.graph.parameters)
        return (f"*{FACTOR}",) if is_learned else ()

    def __repr__(self) -> str:
        count = sum(node.op in ("fake_quantize", "fake_binarize") for node in self.graph.nodes)
        return f"<qat {self.graph.name!r}: {count} fake quantizations>"
