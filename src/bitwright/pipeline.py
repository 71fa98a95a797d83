"""The compiler's table of contents: which passes run, in order, for which purpose."""

from __future__ import annotations

from typing import Any

from bitwright.errors import BitwrightError
from bitwright.executable import Executable, Reference
from bitwright.frontend.load import load
from bitwright.passes.canonicalize import canonicalize
from bitwright.passes.eliminate_common import eliminate_common
from bitwright.passes.eliminate_dead import eliminate_dead
from bitwright.passes.fold_batch_norm import fold_batch_norm
from bitwright.passes.fold_constants import fold_constants
from bitwright.passes.freeze_parameters import freeze_parameters
from bitwright.passes.fuse_regions import fuse_regions
from bitwright.passes.manager import History, Pass, run_passes
from bitwright.passes.merge_projections import merge_projections
from bitwright.passes.recognize_composites import recognize_composites
from bitwright.passes.resolve_shapes import resolve_shapes

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

PASSES: dict[str, Pass] = {
    function.__name__: function
    for function in (
        canonicalize,
        eliminate_common,
        eliminate_dead,
        fold_batch_norm,
        fold_constants,
        freeze_parameters,
        fuse_regions,
        merge_projections,
        recognize_composites,
        resolve_shapes,
    )
}


def compile(
    model: Any, target: str = "cpu", threads: int | None = None, precision: str = "f32"
) -> Executable:
    """Make a model (graph, path, bytes or ModelProto) ready to run.

    `threads` None means as many as the machine has cores. The graph is executed by the reference
    interpreter, which computes in one thread and in the model's own precision.
    """
    if target != "cpu":
        raise BitwrightError(f"there is no target {target!r}", expected="'cpu'")
    if precision != "f32":
        raise BitwrightError(f"there is no precision {precision!r}", expected="'f32'")
    if threads is not None and threads < 1:
        raise BitwrightError("threads must be at least 1", found=threads)
    history = History()
    graph = run_passes(load(model), INFERENCE, history)
    return Executable(graph, history, Reference(graph))
