"""The compiler's table of contents: which passes run, in order, for which purpose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bitwright.backends.cpu.runtime.program import Program
from bitwright.backends.reference import Reference
from bitwright.errors import BitwrightError
from bitwright.executable import Executable
from bitwright.frontend.load import load
from bitwright.ir.graph import Graph
from bitwright.passes.fuse.fuse_regions import fuse_regions
from bitwright.passes.fuse.merge_projections import merge_projections
from bitwright.passes.lower_integer.lower_integer import lower_integer
from bitwright.passes.lower_integer.lower_weights import lower_weights
from bitwright.passes.manager import History, Pass, run_passes
from bitwright.passes.precision.apply import apply_precision
from bitwright.passes.precision.policy import Policy, policy, require_layers
from bitwright.passes.simplify.canonicalize import canonicalize
from bitwright.passes.simplify.eliminate_common import eliminate_common
from bitwright.passes.simplify.eliminate_dead import eliminate_dead
from bitwright.passes.simplify.expand_composites import expand_composites
from bitwright.passes.simplify.expose_weights import expose_weights
from bitwright.passes.simplify.fold_batch_norm import fold_batch_norm
from bitwright.passes.simplify.fold_constants import fold_constants
from bitwright.passes.simplify.freeze_parameters import freeze_parameters
from bitwright.passes.simplify.recognize_composites import recognize_composites
from bitwright.passes.simplify.resolve_shapes import resolve_shapes
from bitwright.passes.simplify.separate_bias import separate_bias
from bitwright.passes.simplify.separate_phases import separate_phases
from bitwright.passes.simplify.share_constants import share_constants
from bitwright.passes.simplify.sink_constants import sink_constants
from bitwright.passes.simplify.sink_transposes import sink_transposes
from bitwright.rewrite.trace import Trace
from bitwright.target import host

PRECISION = "onnx.meta.bitwright.precision"
"""The key in `Graph.meta` of the policy that a model is to be compiled with."""

# Keeps parameters as parameters: what training and calibration start from.
SIMPLIFY: tuple[Pass, ...] = (canonicalize, recognize_composites, canonicalize, eliminate_dead)

# For running: parameters become constants, which lets them fold and, later, be packed.
INFERENCE: tuple[Pass, ...] = (
    freeze_parameters,
    canonicalize,
    recognize_composites,
    fold_batch_norm,
    canonicalize,
    eliminate_dead,
)

# What the CPU backend wants on top: large products, and regions for its kernels.
CPU: tuple[Pass, ...] = (
    sink_transposes,
    merge_projections,
    lower_integer,
    lower_weights,
    merge_projections,
    separate_bias,
    expand_composites,
    canonicalize,
    fuse_regions,
)

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
        lower_integer,
        lower_weights,
        merge_projections,
        recognize_composites,
        resolve_shapes,
        separate_bias,
        separate_phases,
        share_constants,
        sink_constants,
        sink_transposes,
    )
}


def compile(
    model: Any,
    target: str = "cpu",
    threads: int | None = None,
    precision: str | Policy | Mapping[str, Any] | None = None,
) -> Executable:
    """Make a model (graph, path, bytes or ModelProto) ready to run.

    `target` is "cpu" (machine code for this processor, generated here) or "reference" (the
    interpreter). `threads` None means as many as the machine has cores. `precision` is a policy,
    its name or text form (`passes.precision.policy`); None is what the model's metadata says, else
    f32. A node without a kernel runs in the interpreter as a host step: `explain` shows it, and one
    warning names it.
    """
    if target not in ("cpu", "reference"):
        raise BitwrightError(f"there is no target {target!r}", expected="'cpu' or 'reference'")
    loaded = load(model)
    chosen = policy(loaded.meta.get(PRECISION, "f32") if precision is None else precision)
    if threads is not None and threads < 1:
        raise BitwrightError("threads must be at least 1", found=threads)
    history = History()
    graph = run_passes(loaded, INFERENCE, history)
    if precision is not None:
        require_layers(chosen, [loaded, graph])
    if target == "reference":
        graph = run_passes(graph, _policy_passes(chosen), history)
        return Executable(graph, history, Reference(graph))
    return compile_simple(graph, history, threads, chosen)


def compile_simple(
    graph: Graph, history: History, threads: int | None = None, precision: Policy | None = None
) -> Executable:
    """An executable for the CPU from a graph that the inference passes went over already."""
    chosen = policy(graph.meta.get(PRECISION, "f32")) if precision is None else precision
    if not chosen.is_plain:  # products of codes first: they are none of its business
        graph = run_passes(graph, (lower_integer, *_policy_passes(chosen)), history)
    return Executable(graph, history, make_program(run_passes(graph, CPU, history), threads))


def _policy_passes(chosen: Policy) -> tuple[Pass, ...]:
    """`apply_precision` as a pass; canonicalizing afterwards folds the casts of constants."""

    def apply(graph: Graph, trace: Trace) -> Graph:
        return apply_precision(graph, chosen, trace=trace)

    apply.__name__ = apply_precision.__name__
    return () if chosen.is_plain else (apply, canonicalize)


def make_program(fused: Graph, threads: int | None = None) -> Program:
    """Machine code and schedule of a graph that all passes went over."""
    machine = host()
    program = Program(fused, machine, threads or machine.cores)
    program.code.warn_of_fallbacks()
    return program
