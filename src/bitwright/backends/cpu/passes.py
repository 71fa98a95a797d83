"""The passes of the CPU backend."""

from __future__ import annotations

from bitwright.backends.cpu.lowering.expand_missing import expand_missing
from bitwright.passes.fuse.fuse_regions import fuse_regions
from bitwright.passes.fuse.merge_projections import merge_projections
from bitwright.passes.fuse.recompute_elementwise import recompute_elementwise
from bitwright.passes.lower_integer.lower_integer import lower_integer
from bitwright.passes.lower_integer.lower_weights import lower_weights
from bitwright.passes.manager import Pass
from bitwright.passes.order_for_memory import order_for_memory
from bitwright.passes.simplify.canonicalize import canonicalize
from bitwright.passes.simplify.expand_composites import expand_composites
from bitwright.passes.simplify.separate_bias import separate_bias
from bitwright.passes.simplify.sink_transposes import sink_transposes

# Integer products first: the precision policy applies only to floating-point values.
BEFORE_PRECISION: tuple[Pass, ...] = (lower_integer,)

CPU: tuple[Pass, ...] = (
    sink_transposes,
    merge_projections,
    lower_integer,
    lower_weights,
    merge_projections,
    separate_bias,
    expand_missing,
    expand_composites,
    canonicalize,
    fuse_regions,
)

# In a training step values stay in memory from the forward to the backward pass.
CPU_STEP: tuple[Pass, ...] = (*CPU[:-1], recompute_elementwise, fuse_regions, order_for_memory)
