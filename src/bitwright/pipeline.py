"""The compiler's table of contents: the passes in order, and the one way to compile a graph.

INFERENCE -> precision policy -> backend.passes -> backend.build -> backend.load -> Executable
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bitwright.backends.base import Backend, find_backend
from bitwright.backends.cpu.backend import BACKEND as CPU_BACKEND
from bitwright.backends.cpu.runtime.program import Program
from bitwright.errors import BitwrightError
from bitwright.executable import Executable
from bitwright.ir.graph import Graph
from bitwright.passes.fuse.fuse_regions import fuse_regions
from bitwright.passes.fuse.merge_projections import merge_projections
from bitwright.passes.fuse.quantize_early import quantize_early
from bitwright.passes.fuse.recompute_elementwise import recompute_elementwise
from bitwright.passes.lower_integer.lower_integer import lower_integer
from bitwright.passes.lower_integer.lower_weights import lower_weights
from bitwright.passes.lower_integer.store_signed import store_signed
from bitwright.passes.manager import History, Pass, run_passes
from bitwright.passes.order_for_memory import order_for_memory
from bitwright.passes.precision.apply import apply_precision
from bitwright.passes.precision.plain_attention import plain_attention
from bitwright.passes.precision.policy import Policy, policy, require_layers
from bitwright.passes.simplify.canonicalize import canonicalize
from bitwright.passes.simplify.eliminate_common import eliminate_common
from bitwright.passes.simplify.eliminate_dead import eliminate_dead
from bitwright.passes.simplify.expand_composites import expand_composites
from bitwright.passes.simplify.expose_weights import expose_weights
from bitwright.passes.simplify.fold_batch_norm import fold_batch_norm
from bitwright.passes.simplify.fold_constants import fold_constants
from bitwright.passes.simplify.freeze_parameters import freeze_parameters
from bitwright.passes.simplify.hoist_transposes import hoist_transposes
from bitwright.passes.simplify.recognize_composites import recognize_composites
from bitwright.passes.simplify.resolve_shapes import resolve_shapes
from bitwright.passes.simplify.separate_bias import separate_bias
from bitwright.passes.simplify.separate_phases import separate_phases
from bitwright.passes.simplify.share_constants import share_constants
from bitwright.passes.simplify.sink_constants import sink_constants
from bitwright.passes.simplify.sink_transposes import sink_transposes
from bitwright.passes.simplify.widen_reductions import widen_reductions
from bitwright.rewrite.trace import Trace

PRECISION = "onnx.meta.bitwright.precision"
"""The key in `Graph.meta` of the default precision policy."""

# Keeps parameters as parameters, for training and calibration.
SIMPLIFY: tuple[Pass, ...] = (canonicalize, recognize_composites, canonicalize, eliminate_dead)

# Parameters become constants, so that they can be folded and packed.
INFERENCE: tuple[Pass, ...] = (
    freeze_parameters,
    canonicalize,
    recognize_composites,
    fold_batch_norm,
    canonicalize,
    eliminate_dead,
)

# A training step: frozen parameters become constants, and states stay.
TRAINING: tuple[Pass, ...] = (freeze_parameters, canonicalize, hoist_transposes, eliminate_dead)

CPU = CPU_BACKEND.passes

PASSES: dict[str, Pass] = {
    function.__name__: function
    for function in (
        canonicalize,
        eliminate_common,
        eliminate_dead,
        expand_composites,
        expose_weights,
        fold_batch_norm,
        fold_constants,
        freeze_parameters,
        fuse_regions,
        hoist_transposes,
        lower_integer,
        lower_weights,
        merge_projections,
        order_for_memory,
        plain_attention,
        quantize_early,
        recognize_composites,
        recompute_elementwise,
        resolve_shapes,
        separate_bias,
        separate_phases,
        share_constants,
        sink_constants,
        sink_transposes,
        store_signed,
        widen_reductions,
    )
}


@dataclass(frozen=True)
class Optimized:
    """A graph after all passes."""

    graph: Graph
    """After the precision policy and before the backend's passes."""
    lowered: Graph
    """After the backend's passes."""
    history: History


def compile_graph(
    graph: Graph,
    target: str = "cpu",
    threads: int | None = None,
    precision: str | Policy | Mapping[str, Any] | None = None,
) -> Executable:
    """An executable of a graph; `bw.compile` documents the options."""
    backend = find_backend(target)
    if threads is not None and threads < 1:
        raise BitwrightError("threads must be at least 1", found=threads)
    return _executable(optimize(graph, backend, precision), backend, threads)


def optimize(
    graph: Graph,
    backend: Backend[Any, Any],
    precision: str | Policy | Mapping[str, Any] | None = None,
) -> Optimized:
    """Run all passes that a backend needs."""
    chosen = policy(graph.meta.get(PRECISION, "f32") if precision is None else precision)
    history = History()
    simple = run_passes(graph, INFERENCE, history)
    if precision is not None:
        require_layers(chosen, [graph, simple])
    return _lower(simple, history, backend, chosen)


def compile_simple(graph: Graph, history: History, threads: int | None = None) -> Executable:
    """A CPU executable of a graph that already went through the inference passes."""
    chosen = policy(graph.meta.get(PRECISION, "f32"))
    return _executable(_lower(graph, history, CPU_BACKEND, chosen), CPU_BACKEND, threads)


def compile_step(graph: Graph, target: str = "cpu", threads: int | None = None) -> Executable:
    """An executable of a training step, or of a graph whose weights are states."""
    backend = find_backend(target)
    if threads is not None and threads < 1:
        raise BitwrightError("threads must be at least 1", found=threads)
    history = History()
    with backend.prepare():
        simple = run_passes(graph, TRAINING, history)
        lowered = run_passes(simple, backend.step_passes, history)
        return _executable(Optimized(simple, lowered, history), backend, threads)


def make_program(fused: Graph, threads: int | None = None) -> Program:
    """A CPU program of a graph that already went through all passes."""
    return CPU_BACKEND.compile(fused, threads)


def _lower(graph: Graph, history: History, backend: Backend[Any, Any], chosen: Policy) -> Optimized:
    if not chosen.is_plain:
        before, after = backend.passes_before_precision, backend.passes_after_precision(chosen)
        passes = (*before, *_policy_passes(chosen), *after)
        graph = run_passes(graph, passes, history)
    return Optimized(graph, run_passes(graph, backend.passes, history), history)


def _executable(found: Optimized, backend: Backend[Any, Any], threads: int | None) -> Executable:
    return Executable(found.graph, found.history, backend.compile(found.lowered, threads))


def _policy_passes(chosen: Policy) -> tuple[Pass, ...]:
    """`apply_precision` as a pass, and a canonicalization that folds casts of constants."""

    def apply(graph: Graph, trace: Trace) -> Graph:
        return apply_precision(graph, chosen, trace=trace)

    apply.__name__ = apply_precision.__name__
    return (apply, canonicalize)
