"""The ranges of statically quantized values on calibration data, in the quantized model."""

from __future__ import annotations

from collections.abc import Iterable

from bitwright.ir.graph import Value
from bitwright.quant.calibration.intermediate_outputs import IntermediateOutputs
from bitwright.quant.data.batches import Batch
from bitwright.tuning.local_errors import Range, activation_pair
from bitwright.tuning.matching import Matching
from bitwright.tuning.schemes import layer_nodes


def seen_ranges(
    matching: Matching, batches: Iterable[Batch], threads: int | None = None
) -> dict[str, Range]:
    """Minimum and maximum of each layer's quantized input over the batches, by name of layer."""
    inputs: dict[str, Value] = {}
    for site in matching.sites:
        pairs = [activation_pair(node) for node in layer_nodes(matching, site)]
        static = [pair.x for pair in pairs if pair is not None and pair.low is not None]
        if len(static) == 1:
            inputs[site.layer] = static[0]
    if not inputs:
        return {}
    taps = IntermediateOutputs(
        matching.quantized, [v.name for v in inputs.values()], threads=threads, simplify=False
    )
    found: dict[str, Range] = {}
    for batch in batches:
        taps.reset()
        for name, array in taps.run(batch):
            low, high = found.get(name, (0.0, 0.0))
            found[name] = (
                min(low, float(array.min(initial=0))),
                max(high, float(array.max(initial=0))),
            )
    return {layer: found[v.name] for layer, v in inputs.items() if v.name in found}
