"""Coverage tables: what each op declares, and how the official ONNX cases fare."""

from __future__ import annotations

from collections import Counter
from typing import Any

from bitwright.frontend.onnx.conformance import PASS, RANDOM, REFUSED, WRONG, run_all
from bitwright.ops.opdef import REQUIRED, NonDifferentiable, NotYet, OpDef
from bitwright.ops.registry import all_ops


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


def conformance() -> dict[str, Any]:
    """The official ONNX cases, counted by op, with the reasons of refusals."""
    rows: dict[str, dict[str, Any]] = {}
    total: Counter[str] = Counter()
    for result in run_all():
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
