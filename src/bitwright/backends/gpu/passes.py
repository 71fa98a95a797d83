"""The passes of the GPU backend: those of the CPU backend, and what GPU kernels want otherwise.

    int8 attention    computed in the precision of its operands (`plain_attention`)
    u8                stored as i8 (`store_signed`)
    quantization      reads half rows, and comes before movement (`quantize_early`)
    regions           float8 results, norms that store their rows beside their quantization

`LAYOUT` is the place of passes that choose layouts (convolutions in NHWC); they run before
`fuse_regions`.
"""

from __future__ import annotations

from bitwright.ir.graph import Graph
from bitwright.passes.fuse.fuse_regions import Kernels, fuse_for
from bitwright.passes.fuse.merge_projections import merge_projections
from bitwright.passes.fuse.quantize_early import quantize_early
from bitwright.passes.lower_integer.lower_f8 import lower_f8
from bitwright.passes.lower_integer.lower_integer import lower_integer
from bitwright.passes.lower_integer.lower_weights import lower_weights_of_half_rows
from bitwright.passes.lower_integer.store_signed import store_signed
from bitwright.passes.manager import Pass
from bitwright.passes.precision.plain_attention import plain_attention
from bitwright.passes.simplify.canonicalize import canonicalize
from bitwright.passes.simplify.expand_composites import expand_composites_but_f8
from bitwright.passes.simplify.separate_bias import separate_bias
from bitwright.passes.simplify.sink_transposes import sink_transposes
from bitwright.rewrite.trace import Trace

# Quantized products first: the precision policy applies only to floating-point values.
BEFORE_PRECISION: tuple[Pass, ...] = (
    plain_attention,
    sink_transposes,
    merge_projections,
    lower_integer,
    lower_f8,
    lower_weights_of_half_rows,
)

LAYOUT: tuple[Pass, ...] = ()

KERNELS = Kernels(casts_f8=True, quantizes_halves=True, shows_rows=True)


def fuse_regions(graph: Graph, trace: Trace) -> Graph:
    """`fuse_regions` with what the GPU's kernels can do."""
    return fuse_for(graph, trace, KERNELS)


GPU: tuple[Pass, ...] = (
    sink_transposes,
    merge_projections,
    lower_integer,
    lower_f8,
    lower_weights_of_half_rows,
    merge_projections,
    separate_bias,
    expand_composites_but_f8,
    canonicalize,
    quantize_early,
    store_signed,
    *LAYOUT,
    fuse_regions,
)
