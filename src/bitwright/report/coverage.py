"""Coverage tables: what each op declares, and how the official ONNX cases fare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from bitwright.frontend.onnx.conformance import PASS, RANDOM, REFUSED, WRONG, run_all
from bitwright.ir.graph import Graph
from bitwright.ops.opdef import REQUIRED, NonDifferentiable, NotYet, OpDef
from bitwright.ops.registry import all_ops
from bitwright.pipeline import compile as compile_model


def _gradient(op: OpDef) -> str:
    if isinstance(op.grad, NonDifferentiable):
        return f"none: {op.grad.reason}"
    return "not yet" if op.grad is NotYet else "yes"


def _attributes(op: OpDef) -> str:
    return ", ".join(
        name if spec.default is REQUIRED else f"{name}={spec.default}"
        for name, spec in op.attrs.items()
    )


def op_rows() -> list[dict[str, Any]]:
    return [
        {
            "op": op.name,
            "kind": op.kind.value,
            "operands": op.inputs,
            "attributes": _attributes(op),
            "gradient": _gradient(op),
            "scalar": "yes" if op.scalar else "",
        }
        for op in sorted(all_ops().values(), key=lambda op: (op.kind.value, op.name))
    ]


def compiled(graph: Graph) -> Callable[[list[Any]], list[Any]]:
    """A graph as its users run it, with inputs in its order."""
    executable = compile_model(graph)

    def call(inputs: list[Any]) -> list[Any]:
        return list(executable.run(dict(zip(executable.input_names, inputs, strict=True))).values())

    return call


def conformance() -> dict[str, Any]:
    """The official ONNX cases, counted by op, with the reasons of refusals.

    Six cases draw random numbers; of those, types and shapes are compared.
    """
    rows: dict[str, dict[str, Any]] = {}
    total: Counter[str] = Counter()
    for result in run_all(prepare=compiled):
        name = result.ops[0] if result.kind == "node" and result.ops else result.kind
        row = rows.setdefault(
            name, {"op": name, "pass": 0, "host": 0, "refused": 0, "wrong": 0, "reason": ""}
        )
        status = PASS if result.status == RANDOM else result.status
        row[status] += 1
        total[status] += 1
        if status == PASS and result.host_ops:
            row["host"] += 1
            total["host"] += 1
        row["reason"] = row["reason"] or result.reason
    line = (
        f"{total[PASS]} of {sum(total[s] for s in (PASS, REFUSED, WRONG))} pass "
        f"({total['host']} through a host step), {total[REFUSED]} refused, {total[WRONG]} wrong"
    )
    return {"ops": [rows[name] for name in sorted(rows)], "line": line, "total": dict(total)}
