"""Runs the kernels of one op for a target, with several threads, between guard bytes."""

import importlib.util
from pathlib import Path

from bitwright.target import named

_PATH = Path(__file__).parent.parent / "backends" / "run_kernel.py"
_SPEC = importlib.util.spec_from_file_location("kernel_runs", _PATH)
kernel_runs = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(kernel_runs)
TARGETS = kernel_runs.TARGETS


def run_kernel(op, inputs, attrs, constants=(), target="host", threads=1):
    """The kernel's result and the interpreter's; tuples where the op has several results."""
    graph = kernel_runs.graph_of(op, *inputs, constants=constants, **attrs)
    feeds = kernel_runs.feeds_of(graph, inputs)
    done = kernel_runs.Run(graph, feeds, named(target), threads)
    assert done.fault is None
    found = tuple(done.outputs.values())
    expected = tuple(kernel_runs.reference(graph, feeds).values())
    return (found[0], expected[0]) if len(found) == 1 else (found, expected)
