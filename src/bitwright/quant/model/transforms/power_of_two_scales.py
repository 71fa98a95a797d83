"""Power-of-two scales for static inputs of convolutions that other runtimes compute in f32.

ONNX Runtime fuses a convolution into one integer operator if its result is quantized directly:

    dequantize -> conv -> (relu, clip) -> quantize

It runs any other convolution in f32 on dequantized values. That is exact if the scale of the input
is a power of two (`quant.model.weights.round_scales`). Smoothed inputs have such a scale already.
The others get it here, with one factor for all channels, which costs nothing where it folds into
the preceding quantized product (`quant.model.transforms.equalize`).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np

from bitwright.ir.graph import Graph, Node, Value, constant_value
from bitwright.quant.model.assign import Choice
from bitwright.quant.model.products import Product
from bitwright.quant.model.weights.choose import ActivationQuant


def use_power_of_two_scales(graph: Graph, choices: list[Choice]) -> list[Choice]:
    """The choices, with power-of-two scales where a convolution's result stays float."""
    readers = _Readers(graph, choices)
    found = list(choices)
    for place in reversed(range(len(found))):  # a later factor can require an earlier one
        choice = found[place]
        activation, point = choice.activation, choice.point
        if choice.scheme != "static" or activation is None or activation.factors is not None:
            continue
        if not point.products[0].is_conv or point.is_inside:
            continue
        if not all(readers.are_qvalues(product) for product in point.products):
            activation = activation.with_power_of_two(point.channels)
            found[place] = replace(choice, activation=activation)
            readers.static.update({value: [found[place]] for value in point.values})
    return found


class _Readers:
    """The readers and the static choices of each value."""

    def __init__(self, graph: Graph, choices: list[Choice]) -> None:
        self.results = set(graph.results)
        self.nodes: dict[Value, list[Node]] = defaultdict(list)
        for node in graph.nodes:
            for value in node.operands:
                self.nodes[value].append(node)
        self.static: dict[Value, list[Choice]] = defaultdict(list)
        for choice in choices:
            if choice.scheme == "static":
                for value in choice.point.values:
                    self.static[value].append(choice)

    def are_qvalues(self, product: Product) -> bool:
        """Whether a product's result is only read quantized, after at most relu and no-op clips."""
        value = product.node.outputs[0]
        clips: list[Node] = []
        while value not in self.results:
            readers = self.nodes[value]
            if known := self.static.get(value):
                is_alone = len(known) == 1 and len(readers) == len(known[0].point.readers(value))
                activation = known[0].activation
                return is_alone and activation is not None and _are_no_ops(clips, activation)
            if len(readers) != 1 or readers[0].op not in ("relu", "clip"):
                return False
            if readers[0].op == "clip":
                clips.append(readers[0])
            value = readers[0].outputs[0]
        return False


def _are_no_ops(clips: list[Node], activation: ActivationQuant) -> bool:
    """Whether the quantized range lies within the clips' bounds, with one factor at most."""
    factors = activation.factors
    if activation.range is None or (clips and factors is not None and np.ptp(factors) > 0):
        return False
    factor = 1.0 if factors is None else factors[0]
    lowest, highest = (end * factor for end in activation.range.bounds)
    for clip in clips:
        _, low, high = (*clip.inputs, None, None)[:3]
        lows, highs = (None if v is None else constant_value(v) for v in (low, high))
        if (low is not None and (lows is None or lows.max() > lowest)) or (
            high is not None and (highs is None or highs.min() < highest)
        ):
            return False
    return True
