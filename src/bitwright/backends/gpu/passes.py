"""The passes of the GPU backend: those of the CPU backend, and what GPU kernels want otherwise.

    conv_transpose    as convolutions of its phases (`separate_phases`)
    int8 attention    computed in the precision of its operands (`plain_attention`)
    u8                stored as i8 (`store_signed`)
    quantization      reads half rows, and comes before movement (`quantize_early`)
    regions           float8 results, norms that store their rows beside their quantization

`LAYOUT` is the place of passes that choose layouts (convolutions in NHWC); they run before
`fuse_regions`.
"""

from __future__ import annotations

from bitwright.ir.graph import Graph
from bitwright.ops.core.opdef import Kind
from bitwright.passes.fuse.fuse_regions import Kernels, fuse_for
from bitwright.passes.fuse.merge_projections import merge_projections
from bitwright.passes.fuse.quantize_early import quantize_early
from bitwright.passes.lower_integer.lower_f8 import lower_f8
from bitwright.passes.lower_integer.lower_integer import lower_integer_sharing
from bitwright.passes.lower_integer.lower_weights import lower_weights_of_half_rows
from bitwright.passes.lower_integer.store_signed import store_signed
from bitwright.passes.manager import Pass
from bitwright.passes.precision.half_residuals import half_residuals
from bitwright.passes.precision.half_summands import half_summands
from bitwright.passes.precision.plain_attention import plain_attention
from bitwright.passes.precision.plan import HALVES
from bitwright.passes.precision.policy import Policy
from bitwright.passes.simplify.canonicalize import canonicalize
from bitwright.passes.simplify.expand_composites import expand_composites_but_f8
from bitwright.passes.simplify.separate_bias import separate_bias
from bitwright.passes.simplify.separate_phases import separate_phases
from bitwright.passes.simplify.sink_transposes import sink_transposes
from bitwright.passes.simplify.widen_reductions import widen_reductions
from bitwright.rewrite.trace import Trace

# Quantized products first: the precision policy applies only to floating-point values.
BEFORE_PRECISION: tuple[Pass, ...] = (
    separate_phases,
    plain_attention,
    sink_transposes,
    merge_projections,
    lower_integer_sharing,
    lower_f8,
    lower_weights_of_half_rows,
)


def after_precision(policy: Policy) -> tuple[Pass, ...]:
    """What the policy leaves in f32 before a requantization is stored in 16 bits."""
    half = policy.of_kind(Kind.ELEMENTWISE)
    if half not in HALVES:
        return ()

    def residuals(graph: Graph, trace: Trace) -> Graph:
        return half_residuals(graph, trace, half, policy)

    def summands(graph: Graph, trace: Trace) -> Graph:
        return half_summands(graph, trace, half, policy)

    residuals.__name__, summands.__name__ = half_residuals.__name__, half_summands.__name__
    return (residuals, summands)


LAYOUT: tuple[Pass, ...] = ()

KERNELS = Kernels(casts_f8=True, quantizes_halves=True, shows_rows=True, widens_late=True)


def fuse_regions(graph: Graph, trace: Trace) -> Graph:
    """`fuse_regions` with what the GPU's kernels can do."""
    return fuse_for(graph, trace, KERNELS)


GPU: tuple[Pass, ...] = (
    separate_phases,
    sink_transposes,
    merge_projections,
    lower_integer_sharing,
    lower_f8,
    lower_weights_of_half_rows,
    merge_projections,
    separate_bias,
    expand_composites_but_f8,
    canonicalize,
    widen_reductions,
    quantize_early,
    store_signed,
    *LAYOUT,
    fuse_regions,
)
