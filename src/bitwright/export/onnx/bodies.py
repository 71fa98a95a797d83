"""Bodies of control flow: graph attributes, which read outer values by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bitwright.export.onnx.forms import transpose
from bitwright.export.onnx.protos import Body
from bitwright.export.onnx.scope import Ref, Scope
from bitwright.ir import DType, Shape, TensorType

Row = tuple[DType, Shape]


def subgraph(
    e: Scope,
    name: str,
    inputs: Sequence[Row],
    outputs: Sequence[Row],
    write: Callable[..., Sequence[Ref]],
) -> Body:
    """A body that `write` emits, given its scope and inputs."""
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


def scan(
    e: Scope,
    name: str,
    state: Ref,
    rows: Sequence[Ref],
    axis: int,
    types: Sequence[Row],
    row: Row,
    body: Callable[..., Sequence[Ref]],
    reverse: bool = False,
) -> tuple[Ref, Ref]:
    """The final state and the stacked result of a scan along `axis`.

    `types` are those of the state and of one step of each row. The axis is moved to the front:
    on other axes ONNX Runtime crashes without steps, and ONNX's evaluator does not support them.
    """
    element = types[0][0]
    direction = [int(reverse)]
    fronted = [_moved(e, x, axis, 0, len(t[1]) + 1) for x, t in zip(rows, types[1:], strict=True)]
    attrs = {
        "num_scan_inputs": len(rows),
        "scan_input_directions": direction * len(rows) if reverse else None,
        "scan_output_directions": direction if reverse else None,
        "body": subgraph(e, name, types, [types[0], row], body),
    }
    last, y = e.emit("Scan", [state, *fronted], attrs, results=2, dtypes=[element, row[0]])
    return last, _moved(e, y, 0, axis, len(row[1]) + 1)


def _moved(e: Scope, x: Ref, source: int, target: int, rank: int) -> Ref:
    """x with one axis moved."""
    perm = [axis for axis in range(rank) if axis != source]
    perm.insert(target, source)
    return transpose(e, x, *perm)


def finish(scope: Scope, stem: str) -> None:
    """Name the unnamed values and nodes of a scope."""
    for step in scope.steps:
        for ref in step.outputs:
            ref.name = ref.name or scope.session.unique(f"{stem}/{step.op_type}")
        step.name = step.name or step.outputs[0].name
    for ref in scope.initializers:
        ref.name = ref.name or scope.session.unique("const")
