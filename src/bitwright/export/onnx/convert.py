"""Converts a graph, node by node, into ONNX scopes.

The opset is the lowest that can represent the model: conversion starts at the lowest opset, and
restarts at the opset that a node requires. Nothing large is copied, so a restart is cheap.
Quantized models with layer norms start at the opset of LayerNormalization: ONNX Runtime does not
always recognize a decomposed norm, and its separate nodes round differently.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from bitwright.errors import ExportError
from bitwright.export.onnx.functions import record_region
from bitwright.export.onnx.mapping import form_of
from bitwright.export.onnx.options import Options
from bitwright.export.onnx.patterns import match_patterns
from bitwright.export.onnx.protos import Body
from bitwright.export.onnx.schemas import LEAST_OPSET, NEWEST_OPSET
from bitwright.export.onnx.scope import SMALL, NeedsOpset, NoSuchType, Ref, Scope, Session
from bitwright.export.onnx.sizes import bind, bind_all
from bitwright.ir import Graph, Node, OpaqueType, TensorType, Value
from bitwright.ir.dtype import DType, f32, i32, i64
from bitwright.ops.core.opdef import Kind
from bitwright.ops.core.registry import get
from bitwright.passes.lower_integer.operands import has_quantize

NEXT = ".next"
DEFAULT = Options()
NORM_OPSET = 17
"""The first with LayerNormalization."""
_LANGUAGE_MODEL_OPS = frozenset(
    ("block_gather", "block_matmul", "block_grouped_matmul", "kv_write", "cached_attention")
)
_LANGUAGE_MODEL_HINT = (
    "Language models are saved as GGUF or .bw, and as ONNX with MatMulNBits: "
    "bitwright.llm.files.save.save_model(read_source(path), 'model.onnx'), "
    "or bitwright quantize MODEL -o model.onnx."
)
_COMPUTED = (Kind.COMPUTE, Kind.REDUCTION, Kind.ELEMENTWISE)


def convert(graph: Graph, opset: int | None, options: Options = DEFAULT) -> Body:
    """The model at the given opset, or at the lowest that can represent it."""
    if opset is not None and not LEAST_OPSET <= opset <= NEWEST_OPSET:
        raise ExportError(
            f"opset {opset} cannot be written", expected=f"{LEAST_OPSET} to {NEWEST_OPSET}"
        )
    target = opset or _start_opset(graph)
    while True:
        session = Session(target, options)
        session.records_regions = has_quantize(graph)
        scope = Scope(session, graph)
        try:
            return _write_model(scope)
        except NeedsOpset as need:
            if opset is not None or need.opset > NEWEST_OPSET:
                raise ExportError(
                    f"opset {target} cannot represent this node: {need.reason} opset {need.opset}",
                    where=scope.where,
                    hint=f"Export with opset={need.opset}, or without the option.",
                ) from None
            target = need.opset


def _start_opset(graph: Graph) -> int:
    """The opset to start with."""
    has_norms = any(node.op == "layer_norm" for node in graph.nodes)
    return NORM_OPSET if has_norms and has_quantize(graph) else LEAST_OPSET


def _write_model(scope: Scope) -> Body:
    graph, session = scope.graph, scope.session
    for value in (*graph.inputs, *graph.states, *graph.parameters):
        session.names[value.name] = 0
    inputs = [_input(scope, value) for value in (*graph.inputs, *graph.states)]
    bind_all(scope, inputs)
    wanted = [*graph.outputs, *_state_results(graph)]
    finals = _reserve_outputs(graph, session, wanted)
    write_nodes(scope, finals)
    outputs = [_output(scope, name, value) for name, value in wanted]
    for ref in (*inputs, *outputs):
        if isinstance(ref.type, OpaqueType) and ref.type.kind.startswith("tensor("):
            raise ExportError(
                f"the rank of {ref.name!r} is not known",
                where=f"graph {graph.name!r}",
                expected="a rank, which ONNX requires for every input and output",
                hint="Reshape it to a known rank.",
            )
    body = Body(scope, graph.name, inputs, outputs)
    _drop_unread(scope, body)
    for ref in scope.initializers:
        ref.name = ref.name or session.unique("const")
    return body


def _drop_unread(scope: Scope, body: Body) -> None:
    """Remove constants that no node reads."""
    read: set[Ref | None] = set()
    bodies = [body]
    while bodies:
        inner = bodies.pop()
        read.update(inner.outputs)
        for step in inner.scope.steps:
            read.update(step.inputs)
            bodies += [value for value in step.attrs.values() if isinstance(value, Body)]
    for ref in [ref for ref in scope.initializers if not ref.name and ref not in read]:
        del scope.initializers[ref]


def _input(scope: Scope, value: Value) -> Ref:
    element = value.type.dtype if isinstance(value.type, TensorType) else None
    if element:
        scope.check_type(element)
    scope.values[value] = Ref(element, value.name, value.type)
    return scope.values[value]


def _state_results(graph: Graph) -> list[tuple[str, Value]]:
    """The new value of each state, as an output."""
    updates = dict(graph.updates)
    return [(state.name + NEXT, updates.get(state, state)) for state in graph.states]


def _reserve_outputs(
    graph: Graph, session: Session, wanted: list[tuple[str, Value]]
) -> dict[Value, str]:
    """The output name that each computed value gets; its further names are copies."""
    finals: dict[Value, str] = {}
    for name, value in wanted:
        if name in session.names and value.name != name:
            raise ExportError(
                f"output {name!r} has the name of another value, {graph.value(name).node}",
                where=f"graph {graph.name!r}",
                hint="ONNX requires unique names: rename the output.",
            )
        if not value.node.is_boundary and (value not in finals or value.name == name):
            finals[value] = name
    for name, _ in wanted:
        session.names.setdefault(name, 0)
    return finals


def _output(scope: Scope, name: str, value: Value) -> Ref:
    """The value, or a copy, with its output name."""
    ref = scope.values[value]
    if ref.name == name:
        return ref
    scope.node = value.node
    copy = scope.Identity(ref)
    copy.name, copy.type = name, value.type
    scope.steps[-1].name = scope.session.unique(f"{name}/Identity")
    return copy


def write_nodes(scope: Scope, finals: dict[Value, str] | None = None) -> None:
    """Write every node of the scope's graph, whose inputs are defined."""
    patterns = match_patterns(scope)
    for node in scope.graph.nodes:
        scope.node = node
        if node in patterns.absorbed:
            continue
        if node.op in ("constant", "parameter"):
            _write_array(scope, node)
        elif node in patterns.writers:
            mark = scope.mark()
            _bind_results(scope, node, (patterns.writers[node](scope),), mark, finals or {})
        elif not node.is_boundary:
            _write_node(scope, node, finals or {})


def inline(scope: Scope, graph: Graph, operands: Sequence[Ref]) -> tuple[Ref, ...]:
    """The results of a graph inlined into the scope, with these operands as inputs."""
    node = scope.node
    for value, ref in zip(graph.inputs, operands, strict=True):
        scope.values[value] = ref
    outer, scope.graph = scope.graph, graph
    write_nodes(scope)
    scope.graph, scope.node = outer, node
    results = tuple(scope.values[value] for _, value in graph.outputs)
    made = {ref for step in scope.steps for ref in step.outputs}
    for ref in results:
        if ref in made and ref not in operands:
            ref.name = ""  # the caller names it after its node
    return results


def _write_array(scope: Scope, node: Node) -> None:
    value, array = node.outputs[0], node.attrs.get("value")
    if array is None:
        raise ExportError(
            f"parameter {node.name!r} has no value", where=scope.where, hint="Load its array first."
        )
    scope.check_type(value.dtype)
    root = scope
    while root.parent and (node.op == "parameter" or array.nbytes > SMALL):
        root = root.parent  # large arrays of bodies are initializers of the model
    is_reserved = node.op == "parameter" and root is scope
    name = node.name if is_reserved else scope.session.unique(node.name)
    ref = Ref(value.dtype, name, value.type)
    root.initializers[ref] = array
    scope.values[value] = ref


def _write_node(scope: Scope, node: Node, finals: dict[Value, str]) -> None:
    form = form_of(node.op)
    if isinstance(form, str):
        hint = _LANGUAGE_MODEL_HINT if node.op in _LANGUAGE_MODEL_OPS else ""
        raise scope.reject(form, hint)
    for value in node.outputs:
        if isinstance(value.type, TensorType):
            scope.check_type(value.dtype)
    mark = scope.mark()
    refs = [None if v is None else scope.values[v] for v in node.inputs]
    results: Any = None
    refusal: NoSuchType | None = None
    for wider in (lambda element: element, _to_32_bits, _to_64_bits):
        try:
            results = form.write(scope, *_operands(scope, node, refs, wider), **_attrs(node))
            break
        except NoSuchType as error:
            scope.undo(mark)
            refusal = refusal or error
            if not form.widens:
                break
    if results is None:
        assert refusal is not None
        if refusal.opset is not None:
            raise NeedsOpset(refusal.opset, f"{refusal} before")
        raise scope.reject(str(refusal))
    results = results if isinstance(results, tuple) else (results,)
    if _is_region(scope, node, mark):
        record_region(scope, node.op, refs, _attrs(node), results, mark[0])
    _bind_results(scope, node, results, mark, finals)


def _is_region(scope: Scope, node: Node, mark: tuple[int, ...]) -> bool:
    """Whether to record a region: several nodes implement an op of a quantized model. Imported as
    that op, they round the same."""
    is_new_region = len(scope.steps) > mark[0] + 1 and len(scope.session.regions) == mark[1]
    return scope.session.records_regions and is_new_region and get(node.op).kind in _COMPUTED


def _attrs(node: Node) -> dict[str, Any]:
    return get(node.op).call_attrs(node.attrs)


def _operands(scope: Scope, node: Node, refs: Iterable[Ref | None], wider: Any) -> list[Ref | None]:
    """The operands of the mapping, widened; absent ones are None."""
    operands = [
        ref if ref is None or ref.dtype is None else scope.cast(ref, wider(ref.dtype))
        for ref in refs
    ]
    fixed = sum(not operand.variadic for operand in get(node.op).operands)
    return operands + [None] * (fixed - len(operands))


def _to_32_bits(element: DType) -> DType:
    if element.bits >= 32 or not (element.is_float or element.is_integer):
        return element
    return f32 if element.is_float else i32


def _to_64_bits(element: DType) -> DType:
    return i64 if element.is_integer else _to_32_bits(element)


def _bind_results(
    scope: Scope, node: Node, refs: tuple[Ref, ...], mark: tuple[int, ...], finals: dict[Value, str]
) -> None:
    """Set the names, types and sizes of the results of a mapping."""
    made = {ref for step in scope.steps[mark[0] :] for ref in step.outputs}
    for value, ref in zip(node.outputs, refs, strict=True):
        element = value.type.dtype if isinstance(value.type, TensorType) else None
        if element and ref.dtype and ref.dtype != element:
            ref = scope.cast(ref, element)
        elif ref not in made or ref.name:
            ref = scope.Identity(ref)
        ref.name = finals[value] if value in finals else scope.session.unique(value.name)
        ref.type, ref.dtype = value.type, element
        scope.values[value] = ref
        bind(scope, ref, value.type)
    for step in scope.steps[mark[0] :]:
        for ref in step.outputs:
            ref.name = ref.name or scope.session.unique(f"{node.name}/{step.op_type}")
        step.name = step.outputs[0].name
