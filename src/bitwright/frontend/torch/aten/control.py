"""Control flow, and the wrappers that torch puts around regions of a program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bitwright.frontend.torch.context import Context, maps
from bitwright.ir import TensorType, Value
from bitwright.ir.dtype import bool_, i64

_SPACE = "higher_order"


@maps("wrap_with_set_grad_enabled", namespace=_SPACE)
def with_grad(ctx: Context, enabled: bool, module: Any, *inputs: Any) -> list[Any]:
    return ctx.importer.inline(module, inputs)


@maps("wrap_with_autocast", namespace=_SPACE)
def with_autocast(
    ctx: Context, device: str, dtype: Any, enabled: bool, cache: Any, module: Any, *inputs: Any
) -> list[Any]:
    return ctx.importer.inline(module, inputs)  # the casts are in the program


@maps("with_effects", namespace=_SPACE)
def with_effects(ctx: Context, token: Any, op: Any, *args: Any) -> list[Any]:
    """An op with side effects; only checks are supported, which the imported ops repeat."""
    if "check" in str(op) or "assert" in str(op):
        return [token, None]
    raise ctx.refuse(f"{op} has side effects")


def _tensors(values: Sequence[Any]) -> list[Value]:
    return [value for value in values if isinstance(value, Value)]


@maps("cond", namespace=_SPACE)
def cond(
    ctx: Context, condition: Any, yes: Any, no: Any, operands: Sequence[Any] = ()
) -> list[Value]:
    if isinstance(condition, bool):
        return ctx.importer.inline(yes if condition else no, operands)
    bodies = {}
    for name, module in (("then", yes), ("else", no)):
        body = ctx.importer.body(module, operands)
        typed = zip(body.outputs, ctx.results, strict=True)
        bodies[name] = body.build([body.importer.context.operand(y, e) for y, e in typed])
    inputs = [ctx.scalar(condition, bool_), *_tensors(operands)]
    return list(ctx.b.node("if", inputs, bodies, []).outputs)


@maps("while_loop", namespace=_SPACE)
def while_loop(
    ctx: Context, test: Any, step: Any, carried: Sequence[Any], captured: Sequence[Any] = ()
) -> list[Value]:
    """A loop whose condition is computed before the first iteration and at the end of each."""
    initial = [ctx.operand(*pair) for pair in zip(carried, ctx.results, strict=True)]
    first = ctx.scalar(ctx.importer.inline(test, [*initial, *captured])[0], bool_)
    header = (TensorType(i64, ()), TensorType(bool_, ()))
    body = ctx.importer.body(step, [*initial, *captured], header)
    inner = body.importer.context
    after = [inner.operand(*pair) for pair in zip(body.outputs, ctx.results, strict=True)]
    again = body.importer.inline(test, [*after, *body.inputs[len(initial) :]])[0]
    attrs = {"body": body.build([inner.scalar(again, bool_), *after]), "carried": len(initial)}
    operands = [None, first, *initial, *_tensors(captured)]
    return list(ctx.b.node("loop", operands, attrs, []).outputs)


@maps("scan", namespace=_SPACE)
def scan(
    ctx: Context,
    combine: Any,
    initial: Sequence[Value],
    scanned: Sequence[Value],
    captured: Sequence[Any] = (),
) -> list[Value]:
    """A scan along axis 0; the body returns the carried values, then one row of each result."""
    rows = [x.tensor.with_shape(x.shape[1:]) for x in scanned]
    body = ctx.importer.body(combine, [*initial, *rows, *captured])
    attrs = {
        "body": body.build(_tensors(body.outputs)),
        "carried": len(initial),
        "scanned": len(scanned),
    }
    operands = [*initial, *scanned, *_tensors(captured)]
    return list(ctx.b.node("scan", operands, attrs, []).outputs)
