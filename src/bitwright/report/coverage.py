"""Coverage tables: what each op declares, and how the official ONNX cases fare."""

from __future__ import annotations

from typing import Any

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
