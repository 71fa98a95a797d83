"""Layers quantized again from their float form: with finer weights, or with smoothed activations.

    finer weights   w in blocks of 32 values of K with a scale each, activations in float
    smoothing       x / s and w * s with a factor per channel, s_c = sqrt(max|x_c| / max|w_c|);
                    static ranges or one per token as before

Both are for products with constant weights of two axes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import islice

import numpy as np

from bitwright.ir.arrays import Array
from bitwright.ir.graph import Node, Value, constant_value
from bitwright.quant.calibration.intermediate_outputs import IntermediateOutputs
from bitwright.quant.data.batches import Batch
from bitwright.quant.model.weights.nearest import WEIGHT_LIMIT, Range
from bitwright.tuning.float_layers import Change
from bitwright.tuning.local_errors import LocalErrors, with_sizes
from bitwright.tuning.matching import LayerPair, Matching

BLOCK = 32
MOST_BATCHES = 8
"""Batches from which the ranges of smoothed activations are taken."""

Ends = tuple[Array, Array]
"""Minimum and maximum of each input channel."""
Operands = Callable[[Value, Array], tuple[Value, Value]]
"""The operands of a product in place of x and w."""


def product_of(matching: Matching, layer: str) -> Node | None:
    """The product of a layer in the float graph, if its weights are a constant matrix."""
    for node in matching.float_graph.nodes:
        if node.name == layer and node.op == "matmul":
            w = constant_value(node.inputs[1])
            return node if w is not None and w.ndim == 2 and w.dtype.kind == "f" else None
    return None


def with_finer_weights(errors: LocalErrors, site: LayerPair) -> Value:
    def operands(x: Value, w: Array) -> tuple[Value, Value]:
        b = errors.b
        size, columns = w.shape
        padded = np.zeros((-(-size // BLOCK) * BLOCK, columns), np.float32)
        padded[:size] = w
        blocks = padded.reshape(-1, BLOCK, columns)
        scale = _scale(np.abs(blocks).max(1))
        q = np.rint(blocks / scale[:, None]).reshape(padded.shape)[:size].astype(np.int8)
        return x, b.dequantize(b.constant(q), b.constant(scale), axis=0, block=BLOCK)

    return _requantized(errors, site, operands)


def per_token(errors: LocalErrors, x: Value) -> Value:
    """x, quantized with one range per row and dequantized."""
    size = x.shape[-1]
    assert isinstance(size, int)  # the weights have as many rows
    rows = errors.b.dynamic_quantize(x, to="u8", per_token=True)
    return errors.b.dequantize(*rows, axis=-1, block=size)  # type: ignore[no-any-return]


def with_smoothing(seen: Mapping[str, Ends], is_static: bool) -> Change:
    """Smoothing by the ranges that `channel_ranges` found."""

    def change(errors: LocalErrors, site: LayerPair) -> Value:
        def operands(x: Value, w: Array) -> tuple[Value, Value]:
            b = errors.b
            low, high = seen[site.layer]
            size = np.maximum(-low, high)
            factor = np.sqrt(size / np.maximum(np.abs(w).max(1), 1e-30)).astype(np.float32)
            factor[~(factor > 0)] = 1
            x = b.mul(x, b.constant(1 / factor))
            if is_static:
                found = Range.over(float((low / factor).min()), float((high / factor).max()))
                ends = b.constant(found.scale), b.constant(np.uint8(found.zero_point))
                x = b.dequantize(b.quantize(x, *ends, to="u8"), *ends)
            else:
                x = per_token(errors, x)
            smoothed = w * factor[:, None]
            scale = _scale(np.abs(smoothed).max(0))
            q = np.rint(smoothed / scale).astype(np.int8)
            return x, b.dequantize(b.constant(q), b.constant(scale), axis=1)

        return _requantized(errors, site, operands)

    return change


def channel_ranges(
    matching: Matching, layers: Iterable[str], batches: Iterable[Batch], threads: int | None
) -> dict[str, Ends]:
    """Minimum and maximum of each input channel of products, by layer, on the first batches."""
    products = {layer: product_of(matching, layer) for layer in layers}
    inputs = {layer: node.inputs[0] for layer, node in products.items() if node is not None}
    names = {layer: x.name for layer, x in inputs.items() if x is not None}
    if not names:
        return {}
    taps = IntermediateOutputs(
        matching.float_graph, list(names.values()), threads=threads, simplify=False
    )
    found: dict[str, Ends] = {}
    for batch in islice(batches, MOST_BATCHES):
        taps.reset()
        for name, array in taps.run(batch):
            rows = array.reshape(-1, array.shape[-1])
            if rows.size:
                low, high = found.get(name, (rows[0], rows[0]))
                found[name] = np.minimum(low, rows.min(0)), np.maximum(high, rows.max(0))
    return {layer: found[name] for layer, name in names.items() if name in found}


def _requantized(errors: LocalErrors, site: LayerPair, operands: Operands) -> Value:
    """The float layer with other operands of its product, in the place of the quantized one."""

    def changed(node: Node, inputs: tuple[Value | None, ...]) -> tuple[Value | None, ...]:
        w = constant_value(node.inputs[1]) if node.op == "matmul" else None
        if node.name != site.layer or w is None or inputs[0] is None:
            return inputs
        return (*operands(inputs[0], np.asarray(w, np.float32)), *inputs[2:])

    exact = errors.scaled(site, errors.float_result(site, changed))
    return with_sizes(errors.b, exact, site.partner)


def _scale(largest: Array) -> Array:
    """Scales of symmetric 8-bit weights."""
    return np.where(largest > 0, largest / WEIGHT_LIMIT, 1).astype(np.float32)
