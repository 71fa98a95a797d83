"""A graph as the CPU backend runs it, whatever the default of `bitwright.compile` is."""

from __future__ import annotations

from bitwright.backends.cpu.program import Program
from bitwright.executable import Executable
from bitwright.ir.graph import Graph
from bitwright.passes.canonicalize import canonicalize
from bitwright.passes.fuse_regions import fuse_regions
from bitwright.passes.manager import History, run_passes
from bitwright.passes.merge_projections import merge_projections
from bitwright.passes.separate_bias import separate_bias
from bitwright.pipeline import INFERENCE
from bitwright.target import host


def compile_graph(graph: Graph, threads: int = 1) -> Executable:
    history = History()
    graph = run_passes(graph, INFERENCE, history)
    passes = (merge_projections, separate_bias, canonicalize, fuse_regions)
    fused = run_passes(graph, passes, history)
    return Executable(graph, history, Program(fused, host(), threads))
