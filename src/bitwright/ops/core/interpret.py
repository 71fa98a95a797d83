"""The reference interpreter: runs any graph, node by node.

Tests compare compiled results with it, the interpreter fallback runs nodes without kernels in it,
and calibration and error analysis read values through `observe(value, array)`, which is called for
each value. A value is freed after its last use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from bitwright.errors import BitwrightError, NonFiniteError, RunError
from bitwright.ir.allocation import new_array, require_room
from bitwright.ir.dim import Dim, Size, evaluate, symbols_of
from bitwright.ir.feeds import bind_input, bind_inputs, check_inputs, solve
from bitwright.ir.graph import Graph, Node, Value
from bitwright.ir.types import TensorType, ValueType
from bitwright.ir.verify import place
from bitwright.ops.control.custom import check_custom
from bitwright.ops.core.numeric import narrow
from bitwright.ops.core.registry import get

Array = np.ndarray[Any, Any]
Observer = Callable[[Value, Any], None]


def run(
    graph: Graph,
    inputs: Mapping[str, Any],
    *,
    states: dict[str, Array] | None = None,
    observe: Observer | None = None,
) -> dict[str, Any]:
    """The outputs by name. `states` is read and, when the run ends, updated."""
    check_inputs(graph, inputs)
    frame = Frame(graph, {}, observe)
    return frame.run([inputs[v.name] for v in graph.inputs], {} if states is None else states)


class Runner(Protocol):
    """Runs a body in place of the interpreter."""

    def run(self, feeds: Mapping[str, Any], *, outer: Mapping[str, int]) -> dict[str, Any]: ...


def run_node(
    node: Node,
    arrays: Sequence[Any],
    bindings: Mapping[str, int] | None = None,
    observe: Observer | None = None,
    runners: Mapping[str, Runner] | None = None,
) -> tuple[Any, ...]:
    """The results of one node on these operands (None where one is absent).

    `observe` is called for values of its bodies; `runners` run bodies, by attribute name.
    """
    frame = Frame(Graph("node", (node,), ()), dict(bindings or {}), observe)
    frame.runners = {node.attrs[name]: runner for name, runner in (runners or {}).items()}
    given = zip(node.inputs, arrays, strict=True)
    frame.values = {value: array for value, array in given if value is not None}
    with np.errstate(all="ignore"):
        frame.execute(node)
    return tuple(frame.values[value] for value in node.outputs)


class Frame:
    """One execution of one graph (the whole model, or a body)."""

    def __init__(self, graph: Graph, bindings: dict[str, int], observe: Observer | None) -> None:
        self.graph, self.bindings, self.observe = graph, dict(bindings), observe
        self.values: dict[Value, Any] = {}
        self.runners: dict[Graph, Runner] = {}

    def run(self, inputs: list[Any], states: dict[str, Array]) -> dict[str, Any]:
        graph = self.graph
        bound = bind_inputs(graph.inputs, inputs, self.bindings)
        self.values.update(zip(graph.inputs, bound, strict=True))
        uses = dict(graph.uses)
        with np.errstate(all="ignore"):
            for node in graph.nodes:
                self._boundary(node, states) if node.is_boundary else self.execute(node)
                for value in node.outputs:
                    if self.observe:
                        self.observe(value, self.values[value])
                    if not uses.get(value):
                        self.values.pop(value)
                for value in node.operands:
                    uses[value] -= 1
                    if not uses[value]:
                        self.values.pop(value)
        results = {name: self.values[value] for name, value in graph.outputs}
        states.update({state.name: self.values[value] for state, value in graph.updates})
        return results

    def _boundary(self, node: Node, states: dict[str, Array]) -> None:
        if node.op == "input":
            return
        value = states.get(node.name) if node.op == "state" else None
        if value is None:
            value = node.attrs.get("value")
        if value is None:
            if node.op != "state":
                raise RunError("has no value", where=place(self.graph, node))
            type_ = node.outputs[0].tensor
            shape, where = type_.concrete(self.bindings), place(self.graph, node)
            value = new_array(shape, type_.dtype.numpy, str(node.outputs[0]), where)
            value[...] = 0
        self.values[node.outputs[0]] = bind_input(node.outputs[0], value, self.bindings)

    def execute(self, node: Node) -> None:
        opdef = get(node.op)
        where = place(self.graph, node)
        arrays = [None if v is None else self.values[v] for v in node.inputs]
        fixed = sum(not operand.variadic for operand in opdef.operands)
        arrays += [None] * (fixed - len(arrays))
        attrs = {k: self._resolve(v) for k, v in opdef.call_attrs(node.attrs).items()}
        self._check_memory(node, where)
        try:
            result = opdef.reference(*arrays, **attrs)
        except BitwrightError as error:
            kind = NonFiniteError if isinstance(error, NonFiniteError) else RunError
            raise kind(str(error), where=where) from None
        except MemoryError:
            raise RunError("there is not enough memory for its result", where=where) from None
        except (ValueError, IndexError, TypeError, ArithmeticError, AssertionError) as error:
            raise RunError(f"cannot be computed: {error}", where=where) from error
        results = result if isinstance(result, tuple) else (result,)
        if node.op == "custom":
            check_custom(node, results, where)
        for value, array in zip(node.outputs, results, strict=True):
            self.values[value] = self._finish(value, array, where)

    def _check_memory(self, node: Node, where: str) -> None:
        for value in node.outputs:
            type_ = value.type
            if not isinstance(type_, TensorType):
                continue
            if all(s.name in self.bindings for s in type_.symbols):
                shape = type_.concrete(self.bindings)
                if min(shape, default=0) < 0:
                    continue  # the op's own error is clearer
                require_room(shape, max(type_.dtype.bits, 8) // 8, str(value), where)

    def _finish(self, value: Value, array: Any, where: str) -> Any:
        type_ = value.type
        if not isinstance(type_, TensorType):
            return array
        array = np.asarray(array)
        require_room(array.shape, max(type_.dtype.bits, 8) // 8, str(value), where)
        array = narrow(array, type_.dtype)
        fits = array.ndim == type_.rank and all(
            solve(size, actual, self.bindings)
            for size, actual in zip(type_.shape, array.shape, strict=True)
        )
        if not fits:
            raise RunError(
                f"result {value} has another shape than inferred",
                where=where,
                expected=f"{type_} with {self.bindings}",
                found=list(array.shape),
            )
        return array

    def _resolve(self, attr: Any) -> Any:
        if isinstance(attr, Dim):
            return evaluate(attr, self.bindings)
        if isinstance(attr, tuple):
            return tuple(self._resolve(item) for item in attr)
        if isinstance(attr, Graph):
            return Body(attr, self)
        return attr


class Body:
    """A nested graph as an argument of `reference`: a callable from arrays to arrays."""

    def __init__(self, graph: Graph, outer: Frame) -> None:
        self.graph, self.outer = graph, outer

    def __call__(self, *arrays: Any) -> tuple[Any, ...]:
        runner = self.outer.runners.get(self.graph)
        if runner is not None:
            named = zip((value.name for value in self.graph.inputs), arrays, strict=True)
            return tuple(runner.run(dict(named), outer=self.outer.bindings).values())
        frame = Frame(self.graph, self.outer.bindings, self.outer.observe)
        return tuple(frame.run(list(arrays), {}).values())

    def result_types(self, *arrays: Any) -> tuple[ValueType, ...]:
        """The result types of a call; sizes that only a run decides are 0."""
        bindings = dict(self.outer.bindings)
        bind_inputs(self.graph.inputs, arrays, bindings)

        def known(size: Size) -> int:
            bound = all(s.name in bindings for s in symbols_of(size))
            return evaluate(size, bindings) if bound else 0

        return tuple(
            type_.with_shape(map(known, type_.shape)) if isinstance(type_, TensorType) else type_
            for type_ in (value.type for _, value in self.graph.outputs)
        )
