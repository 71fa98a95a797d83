"""An elementwise region (`Expression`) as Triton statements on tiles in registers.

    lines, results = render(expression, ["acc", "e0"], prefix="v")

`Expression` is the CPU backend's: steps over inputs, with constant scalars inside. Inputs are
variables in computed
types (`types.widened`); results are variables in computed types, and `stored` converts one for a
store.
"""

from __future__ import annotations

from collections.abc import Sequence

from bitwright.backends.cpu.codegen.expression import Expression, Step, ValueRef
from bitwright.backends.gpu.codegen.activations import form_of, short_steps
from bitwright.backends.gpu.codegen.scalars import Lines, Term, TritonScalars
from bitwright.backends.gpu.codegen.types import triton_type, widened
from bitwright.errors import CompileError
from bitwright.ir.dtype import DType, bf16, bool_, f16, f32
from bitwright.ops.core.registry import get


def render(
    expression: Expression, inputs: Sequence[str], prefix: str = "v"
) -> tuple[list[str], list[Term]]:
    """Statements that compute an expression, and its results."""
    lines = Lines(prefix)
    known = [
        Term(name, widened(dtype)) for name, dtype in zip(inputs, expression.inputs, strict=True)
    ]
    short = short_steps(expression)
    for number, (step, is_short) in enumerate(
        zip(expression.steps, short, strict=True), len(known)
    ):
        known.append(_render_step(lines, step, known, number in expression.outputs, is_short))
    return lines.lines, [known[number] for number in expression.outputs]


def why_not_render(expression: Expression) -> str:
    """Why an expression has no Triton form, or ""."""
    try:
        render(expression, [f"x{n}" for n in range(len(expression.inputs))])
        for dtype in (*expression.inputs, *expression.results):
            triton_type(dtype)
    except CompileError as error:
        return str(error)
    return ""


def loaded(text: str, dtype: DType) -> str:
    """A loaded value in its computed type."""
    return f"{text}.to(tl.float32)" if dtype in (f16, bf16) else text


def as_stored(text: str, dtype: DType) -> str:
    """A computed value in its storage type."""
    return f"{text}.to({triton_type(dtype)})" if dtype in (f16, bf16) else text


def _render_step(
    lines: Lines, step: Step, known: Sequence[Term], is_result: bool, is_short: bool
) -> Term:
    """The result of a step. Casts to halves inside an expression do not round, as other results
    there do not: halves are computed in f32."""
    operands = [known[o.number] if isinstance(o, ValueRef) else o for o in step.operands]
    typed = next((o.dtype for o in operands if isinstance(o, Term)), step.dtype)
    e = TritonScalars(lines, typed if step.dtype == bool_ else step.dtype)
    if step.op == "cast":
        x = operands[0]
        if x is None:
            raise CompileError("a cast has no operand")
        if isinstance(x, Term) and x.dtype == f32 and step.dtype in (f16, bf16) and not is_result:
            return x
        return e.cast(x, step.dtype)
    x = operands[0] if operands else None
    if isinstance(x, Term) and x.dtype == f32 and (form := form_of(step, is_short)) is not None:
        return e.result(form(e, x), step.dtype)
    opdef = get(step.op)
    if opdef.scalar is None:
        raise CompileError(f"op {step.op!r} has no scalar form")
    return e.result(opdef.scalar(e, *operands, **opdef.call_attrs(dict(step.attrs))), step.dtype)
