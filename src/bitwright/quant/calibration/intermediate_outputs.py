"""Run a compiled graph with chosen intermediate values (taps) as extra outputs.

Observed values become outputs of a copy of the graph before any pass runs, so fusion stores them
and the memory plan keeps them. Output arrays are reused from run to run. If the taps of a batch
exceed the memory budget, the batch runs several times, each time with some of the taps. Values
inside bodies of if / loop / scan are reported by an observer callback, once per execution of the
body.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from bitwright import knobs
from bitwright.backends.cpu.lowering.artifact import KernelCode
from bitwright.backends.cpu.runtime.program import Program
from bitwright.backends.reference import ReferenceEngine
from bitwright.errors import CalibrationError
from bitwright.executable import Executable
from bitwright.ir.arrays import Array, as_array
from bitwright.ir.dim import Sizes
from bitwright.ir.dtype import string
from bitwright.ir.edit import prune, replace_nodes
from bitwright.ir.feeds import check_inputs, input_sizes
from bitwright.ir.graph import Graph, Node, Value
from bitwright.ir.paths import find_values
from bitwright.ir.types import TensorType
from bitwright.passes.manager import History, run_passes
from bitwright.passes.simplify.freeze_parameters import freeze_parameters
from bitwright.pipeline import CPU, INFERENCE, make_program

Feeds = Mapping[str, Any]


class IntermediateOutputs:
    """Runs a graph and returns the values of its taps, by the requested names."""

    def __init__(
        self,
        graph: Graph,
        names: Iterable[str],
        *,
        threads: int | None = None,
        budget: int | None = None,
        simplify: bool = True,
    ) -> None:
        if not isinstance(graph, Graph):
            raise CalibrationError(
                "taps are values of a graph",
                expected="a Graph",
                found=type(graph).__name__,
                hint="bw.load returns the graph of a file.",
            )
        if isinstance(names, str) or not isinstance(names, Iterable):
            found = repr(names)
            raise CalibrationError("taps is not a list of names", expected='["name"]', found=found)
        self.graph, self.names = graph, tuple(dict.fromkeys(names))
        if wrong := [name for name in self.names if not isinstance(name, str)]:
            raise CalibrationError("a tap is not a name of a value", found=repr(wrong[0]))
        self._threads, self._simplify = threads, simplify
        self._budget = knobs.TAP_BYTES.number() if budget is None else budget
        self.values = find_values(graph, self.names)
        for name, value in self.values.items():
            if not isinstance(value.type, TensorType) or value.dtype == string:
                raise CalibrationError(f"tap {name!r} is not a numeric tensor", found=value.type)
        outside = set(graph.values.values())
        given = {v for v in outside if v.node.op in ("input", "constant", "parameter")}
        self._given = [n for n in self.names if self.values[n] in given]
        self._inner = [n for n in self.names if self.values[n] not in outside]
        others = {*self._given, *self._inner}
        self._stored = [n for n in self.names if n not in others]
        self._runs: list[_Run] = []

    def run(self, feeds: Feeds) -> Iterator[tuple[str, Array]]:
        """Name and array of every tap; an array is valid until the next one is requested.

        A value inside a body is yielded once per execution of the body.
        """
        for found in self.run_parts(feeds):
            yield from found

    def run_parts(self, feeds: Feeds) -> Iterator[list[tuple[str, Array]]]:
        """Like `run`, but yields all taps of one run of the model at once."""
        check_inputs(self.graph, feeds)
        bindings = Sizes(input_sizes(self.graph, feeds))
        if self._given:
            given = ((name, self.values[name]) for name in self._given)
            yield [
                (name, as_array(feeds[v.name] if v.node.op == "input" else v.node.attrs["value"]))
                for name, v in given
            ]
        self._group(bindings)
        for part in self._runs:
            yield part.run(feeds, bindings)

    @property
    def states(self) -> dict[str, Array]:
        """Copies of the graph's states, for `restore`."""
        return {n: a.copy() for part in self._runs for n, a in part.exe.engine.states.items()}

    def restore(self, states: Mapping[str, Array]) -> None:
        """Restore the graph's states; states without a saved value are reset."""
        for part in self._runs:
            part.exe.engine.states.clear()
            part.exe.engine.states.update({name: a.copy() for name, a in states.items()})

    def reset(self) -> None:
        for part in self._runs:
            part.exe.reset()

    @property
    def kernels(self) -> list[KernelCode]:
        """The kernels of the models compiled so far."""
        programs = [p.exe.engine for p in self._runs if isinstance(p.exe.engine, Program)]
        return [kernel for program in programs for kernel in program.artifact.kernels.values()]

    @property
    def passes(self) -> int:
        """The number of runs of the model per batch."""
        return len(self._runs)

    def _group(self, bindings: Mapping[str, int]) -> None:
        """Distribute the taps over runs, unless the existing runs fit this batch."""
        sizes = {name: _nbytes(self.values[name].tensor, bindings) for name in self._stored}
        if self._runs and all(self._fits(run.names, sizes) for run in self._runs):
            return
        groups: list[list[str]] = [[]]
        for name in self._stored:
            if not self._fits([*groups[-1], name], sizes):
                groups.append([])
            groups[-1].append(name)
        inner = {name: self.values[name] for name in self._inner}
        self._runs = [
            _Run(self.graph, {n: self.values[n] for n in group}, inside, self._compile)
            for group, inside in zip(groups, [inner, *[{}] * len(groups)], strict=False)
            if group or inside
        ]

    def _fits(self, names: Iterable[str], sizes: Mapping[str, int]) -> bool:
        found = [sizes[name] for name in names if name in sizes]
        return len(found) <= 1 or sum(found) <= self._budget

    def _compile(self, graph: Graph, holders: list[Node]) -> Executable:
        """Compile; bodies of `holders` are not changed, so that their values can be observed."""
        history = History()
        passes = INFERENCE if self._simplify else (freeze_parameters,)
        simple = run_passes(graph, passes, history)
        fused = run_passes(simple, CPU, history)
        wanted = {node.name: node for node in holders}
        kept = {node.name: node for node in fused.nodes if node.name in wanted}
        if all(name in kept and _same_operands(kept[name], wanted[name]) for name in wanted):
            fused = _with_bodies(fused, wanted)
            return Executable(simple, history, make_program(fused, self._threads))
        return Executable(graph, history, ReferenceEngine(graph))


def _same_operands(node: Node, other: Node) -> bool:
    return [v.type for v in node.operands] == [v.type for v in other.operands]


class _Run:
    """A compiled copy of the graph with some of the taps."""

    def __init__(
        self,
        graph: Graph,
        stored: Mapping[str, Value],
        inner: Mapping[str, Value],
        compile_: Callable[[Graph, list[Node]], Executable],
    ) -> None:
        self.names = (*stored, *inner)
        self._types = {name: value.tensor for name, value in stored.items()}
        self._outputs = {f"tap {i}": name for i, name in enumerate(stored)}
        self._inner = {value: name for name, value in inner.items()}
        self._buffers: dict[str, Array] = {}
        outputs = list(zip(self._outputs, stored.values(), strict=True))
        holders = _holders(graph, set(inner.values()))
        for node in holders:
            outputs += [(f"body {len(outputs) + i}", v) for i, v in enumerate(node.outputs)]
        self.exe = compile_(prune(graph.with_(outputs=tuple(outputs))), holders)

    def run(self, feeds: Feeds, bindings: Mapping[str, int]) -> list[tuple[str, Array]]:
        seen: list[tuple[str, Array]] = []

        def observe(value: Value, array: Any) -> None:
            if value in self._inner:
                seen.append((self._inner[value], np.array(array)))

        if not self._inner:
            results = self.exe.run(feeds, out=self._arrays(bindings))
        elif isinstance(self.exe.engine, ReferenceEngine):
            results = self.exe.run(feeds, observe=observe)
        else:
            self.exe.engine.observe = observe  # type: ignore[attr-defined]
            results = self.exe.run(feeds, out=self._arrays(bindings))
        return [(name, results[output]) for output, name in self._outputs.items()] + seen

    def _arrays(self, bindings: Mapping[str, int]) -> dict[str, Array]:
        """An output array for every tap whose size is known before the run."""
        arrays: dict[str, Array] = {}
        for output, name in self._outputs.items():
            type_ = self._types[name]
            if not _is_known(type_, bindings):
                continue
            shape = type_.concrete(bindings)
            nbytes = math.prod(shape) * type_.dtype.numpy.itemsize
            held = self._buffers.get(name)
            if held is None or held.nbytes < nbytes:
                held = self._buffers[name] = np.empty(nbytes, np.uint8)
            arrays[output] = held[:nbytes].view(type_.dtype.numpy).reshape(shape)
        return arrays


def _holders(graph: Graph, inner: set[Value]) -> list[Node]:
    """The nodes whose bodies contain tapped values."""

    def holds(body: Graph) -> bool:
        return any(value in inner for _, node in body.walk() for value in node.outputs)

    return [node for node in graph.nodes if any(map(holds, node.bodies.values()))]


def _with_bodies(graph: Graph, wanted: Mapping[str, Node]) -> Graph:
    """The graph with the bodies of `wanted`, by name of node."""

    def change(node: Node) -> Node:
        if node.name not in wanted:
            return node
        return node.with_(attrs={**node.attrs, **wanted[node.name].bodies})

    return replace_nodes(graph, change, bodies=False) if wanted else graph


def _is_known(type_: TensorType, bindings: Mapping[str, int]) -> bool:
    return all(symbol.name in bindings for symbol in type_.symbols)


def _nbytes(type_: TensorType, bindings: Mapping[str, int]) -> int:
    """Bytes of a tensor; 0 if its size depends on the data."""
    if not _is_known(type_, bindings):
        return 0
    return math.prod(type_.concrete(bindings)) * type_.dtype.numpy.itemsize
