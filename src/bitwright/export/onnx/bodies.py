"""Bodies of control flow: graphs inside attributes, which see the values around them by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bitwright.export.onnx.protos import Body
from bitwright.export.onnx.scope import Ref, Scope
from bitwright.ir.dtype import DType
from bitwright.ir.types import Shape, TensorType

Row = tuple[DType, Shape]


def subgraph(
    e: Scope,
    name: str,
    inputs: Sequence[Row],
    outputs: Sequence[Row],
    write: Callable[..., Sequence[Ref]],
) -> Body:
    """A body that a decomposition writes itself; `write` gets its scope and inputs."""
    scope = Scope(e.session, e.graph, e)
    stem = f"{e.node.name if e.node else 'graph'}/{name}"
    refs = [
        Ref(element, e.session.unique(f"{stem}/in{i}"), TensorType(element, shape))
        for i, (element, shape) in enumerate(inputs)
    ]
    results = list(write(scope, *refs))
    for ref, (element, shape) in zip(results, outputs, strict=True):
        ref.type = TensorType(element, shape)
    finish(scope, stem)
    return Body(scope, stem, refs, results)


def finish(scope: Scope, stem: str) -> None:
    """Name what a scope made and has not named yet."""
    for step in scope.steps:
        for ref in step.outputs:
            ref.name = ref.name or scope.session.unique(f"{stem}/{step.op_type}")
        step.name = step.name or step.outputs[0].name
    for ref in scope.initializers:
        ref.name = ref.name or scope.session.unique("const")
