"""Model-local functions: what standard ops cannot say in one node, under the op's own name.

The body is standard ops, so that the model runs everywhere; the call carries the op's attributes,
so that an importer that knows the name need not look inside. Their domain is "bitwright".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bitwright.export.onnx.scope import Function, Ref, Scope, Session, Step

DOMAIN = "bitwright"


def call(
    e: Scope,
    op: str,
    inputs: Sequence[Ref],
    attrs: dict[str, Any],
    body: Callable[..., tuple[Ref, ...]],
) -> tuple[Ref, ...]:
    """A call of the function for these types and attributes, written on first use; or its body."""
    if e.session.options.functions == "inline":
        return body(e, *inputs)
    key = (op, tuple(ref.dtype for ref in inputs), tuple(sorted(attrs.items(), key=str)))
    functions = e.session.functions
    if key not in functions:
        count = sum(function.op == op for function in functions.values())
        functions[key] = _write(e, op, f"{op}_{count}" if count else op, inputs, attrs, body)
    function = functions[key]
    results = [Ref(ref.dtype) for ref in function.outputs]
    e.steps.append(Step(function.name, list(inputs), results, attrs, DOMAIN))
    return tuple(results)


def _write(
    e: Scope,
    op: str,
    name: str,
    inputs: Sequence[Ref],
    attrs: dict[str, Any],
    body: Callable[..., tuple[Ref, ...]],
) -> Function:
    scope = Scope(Session(e.opset, e.session.options), e.graph)
    scope.node = e.node
    formals = [Ref(ref.dtype, scope.session.unique(f"in{i}")) for i, ref in enumerate(inputs)]
    results = body(scope, *formals)
    for i, ref in enumerate(results):
        ref.name = scope.session.unique(f"out{i}")
    for ref in scope.initializers:
        ref.name = ref.name or scope.session.unique("const")
    for step in scope.steps:
        for ref in step.outputs:
            ref.name = ref.name or scope.session.unique(step.op_type.lower())
        step.name = step.outputs[0].name
    return Function(op, name, tuple(attrs), formals, list(results), scope)
