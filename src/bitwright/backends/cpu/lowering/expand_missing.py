"""Expands ops without a kernel into the ops that their gradient rules are composed of.

An op whose gradient is `composed(compose)` has a formula in other ops. If all of those have
kernels, the formula runs compiled, and the op needs no interpreter fallback. Half floats are
computed in f32, so that only the result is rounded.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from bitwright.backends.cpu.lowering.context import LOWERINGS, VIEWS
from bitwright.errors import BitwrightError
from bitwright.ir.dtype import f32
from bitwright.ir.graph import Graph, Node, Value
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.opdef import OpDef
from bitwright.ops.core.registry import all_ops, get
from bitwright.ops.core.reverse import composition
from bitwright.passes.simplify.expand_composites import RULES as COMPOSITES
from bitwright.rewrite import Match, Rule, Trace, any_operands, rewrite

REGISTERED = "bitwright.backends.cpu.lowering.registered"
"""The module that fills LOWERINGS; it is slow to import, so the first use imports it."""
LOOPS = frozenset({"loop", "scan"})
BOUNDARY = frozenset({"input", "parameter", "constant", "state"})


def expand_missing(graph: Graph, trace: Trace) -> Graph:
    if not any(rule.pattern.op in graph_ops(graph) for rule in _rules()):
        return graph
    return rewrite(graph, _rules(), trace)


def graph_ops(graph: Graph) -> set[str]:
    """The ops of a graph and of the bodies in it."""
    found = set()
    for node in graph.nodes:
        found.add(node.op)
        for body in node.attrs.values():
            if isinstance(body, Graph):
                found |= graph_ops(body)
    return found


def _compose(b: Any, node: Node) -> tuple[Value, ...]:
    """The results of a node by its formula."""
    opdef = get(node.op)
    compose = composition(node.op)
    assert compose is not None
    fixed = sum(not operand.variadic for operand in opdef.operands)
    inputs = [None if v is None else _widened(b, v) for v in node.inputs]
    inputs += [None] * (fixed - len(inputs))
    answer = compose(b, *inputs, **opdef.call_attrs(node.attrs))
    results = answer if isinstance(answer, tuple) else (answer,)
    return tuple(
        v if v.dtype == old.dtype else b.cast(v, to=old.dtype)
        for v, old in zip(results, node.outputs, strict=True)
    )


def _widened(b: Any, value: Value) -> Value:
    is_half = value.dtype.name in ("f16", "bf16")
    return b.cast(value, to=f32) if is_half else value


def _why_not_expand(m: Match) -> str:
    """Why a node's formula would not run compiled, or ""."""
    b = Builder("formula")
    try:
        _compose(b, m.root)
    except BitwrightError as error:
        return f"its formula does not type: {error}"
    ops = graph_ops(b.build())
    if ops & LOOPS:
        return "its formula is a loop, which is slower than the interpreter on long sequences"
    missing = sorted(op for op in ops if not _is_compiled(op))
    return f"its formula has no kernel for {', '.join(missing)}" if missing else ""


def _is_compiled(op: str) -> bool:
    return op in BOUNDARY or _has_kernel(get(op))


def _has_kernel(opdef: OpDef) -> bool:
    name = opdef.name
    is_known = name in LOWERINGS or name in VIEWS or name == "fused"
    return is_known or opdef.scalar is not None or name in {r.pattern.op for r in COMPOSITES}


@functools.cache
def _rules() -> list[Rule]:
    importlib.import_module(REGISTERED)
    return [
        Rule(
            f"{name.replace('_', '-')}-as-formula",
            any_operands(name),
            lambda op, m: _compose(op, m.root),
            _why_not_expand,
        )
        for name, opdef in all_ops().items()
        if composition(name) is not None and not _has_kernel(opdef)
    ]
