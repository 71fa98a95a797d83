"""The passes of the GPU backend. They are those of the CPU backend until a GPU kernel wants
another graph.

`LAYOUT` is the place of passes that choose layouts (convolutions in NHWC); they run before
`fuse_regions`.
"""

from __future__ import annotations

from bitwright.passes.fuse.fuse_regions import fuse_regions
from bitwright.passes.fuse.merge_projections import merge_projections
from bitwright.passes.lower_integer.lower_f8 import lower_f8
from bitwright.passes.lower_integer.lower_integer import lower_integer
from bitwright.passes.lower_integer.lower_weights import lower_weights_of_half_rows
from bitwright.passes.manager import Pass
from bitwright.passes.simplify.canonicalize import canonicalize
from bitwright.passes.simplify.expand_composites import expand_composites_but_f8
from bitwright.passes.simplify.separate_bias import separate_bias
from bitwright.passes.simplify.sink_transposes import sink_transposes

# Quantized products first: the precision policy applies only to floating-point values.
BEFORE_PRECISION: tuple[Pass, ...] = (lower_integer, lower_f8, lower_weights_of_half_rows)

LAYOUT: tuple[Pass, ...] = ()

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
    *LAYOUT,
    fuse_regions,
)
