"""Coverage tables: the declarations of each op, and the results of the official ONNX cases."""

from __future__ import annotations

from collections import Counter
from typing import Any

from bitwright.frontend.onnx.conformance import PASS, RANDOM, REFUSED, WRONG, run_all
from bitwright.ir.graph import Graph
from bitwright.ops.core.opdef import REQUIRED, NonDifferentiable, NotYet, OpDef
from bitwright.ops.core.registry import all_ops
from bitwright.pipeline import compile_graph


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


class Compiled:
    """A compiled graph that takes its inputs as a list."""

    def __init__(self, graph: Graph) -> None:
        self.executable = compile_graph(graph)

    def __call__(self, inputs: list[Any]) -> list[Any]:
        names = self.executable.input_names
        return list(self.executable.run(dict(zip(names, inputs, strict=True))).values())

    @property
    def fallback_ops(self) -> tuple[str, ...]:
        """The ops of its interpreter fallbacks; unmapped ONNX nodes have their ONNX name."""
        nodes = (step.op for step in self.executable.engine.fallbacks)  # type: ignore[attr-defined]
        return tuple(dict.fromkeys(node.attrs.get("op_type", node.op) for node in nodes))


def conformance() -> dict[str, Any]:
    """Results of the official ONNX cases by op, with the reasons for refusals.

    Six cases draw random numbers: only types and shapes are compared.
    """
    rows: dict[str, dict[str, Any]] = {}
    total: Counter[str] = Counter()
    for result in run_all(prepare=Compiled):
        name = result.ops[0] if result.kind == "node" and result.ops else result.kind
        row = rows.setdefault(
            name, {"op": name, "pass": 0, "fallback": 0, "refused": 0, "wrong": 0, "reason": ""}
        )
        status = PASS if result.status == RANDOM else result.status
        row[status] += 1
        total[status] += 1
        if status == PASS and result.fallback_ops:
            row["fallback"] += 1
            total["fallback"] += 1
        row["reason"] = row["reason"] or result.reason
    line = (
        f"{total[PASS]} of {sum(total[s] for s in (PASS, REFUSED, WRONG))} pass "
        f"({total['fallback']} with an interpreter fallback), "
        f"{total[REFUSED]} refused, {total[WRONG]} wrong"
    )
    return {"ops": [rows[name] for name in sorted(rows)], "line": line, "total": dict(total)}
