"""A compiled model: `exe.run({"x": array})` gives a dict of arrays in output order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from bitwright.backends.outputs import check_distinct
from bitwright.errors import RunError
from bitwright.ir.feeds import check_inputs
from bitwright.ir.graph import Graph

if TYPE_CHECKING:  # both are slow to import, and a run needs neither
    from bitwright.ops.interpret import Observer
    from bitwright.passes.manager import History

Array = np.ndarray[Any, Any]


class Engine(Protocol):
    """What executes a graph: a backend's program."""

    states: dict[str, Array]

    def run(self, feeds: Mapping[str, Any], out: Mapping[str, Array] | None) -> dict[str, Any]: ...


class Executable:
    """Runs a graph. Named state lives in the executable, across runs, until `reset`.

    `interface` is a graph with the same inputs and outputs; what is between them may be missing.
    """

    def __init__(self, graph: Graph, history: History, engine: Engine) -> None:
        self.graph, self.history, self.engine = graph, history, engine
        self._present(graph)

    def _present(self, interface: Graph) -> None:
        self.interface = interface
        self.input_names = tuple(value.name for value in interface.inputs)
        self.output_names = tuple(name for name, _ in interface.outputs)
        self._wanted = frozenset(self.input_names)

    def run(
        self,
        inputs: Mapping[str, Any] | None = None,
        /,
        *positional: Any,
        out: Mapping[str, Array] | None = None,
        observe: Observer | None = None,
    ) -> dict[str, Any]:
        """Outputs by name, from inputs by name or in order; the arrays are the caller's own.

        Arrays in `out` (by output name) are written in place; no two of them may share memory. Runs
        of several threads follow each other; a run inside another, such as a custom op may start,
        takes memory of its own, and is refused where the executable has state. With `observe` the
        run goes through the reference interpreter, which shows every value as it is made.
        """
        feeds = self._feeds(inputs, positional)
        if feeds.keys() != self._wanted:
            check_inputs(self.interface, feeds)
        if out and (unknown := set(out) - set(self.output_names)):
            raise RunError(
                f"there is no output {min(unknown)!r}", expected=", ".join(self.output_names)
            )
        if out and len(out) > 1:
            check_distinct(out)
        if observe is not None:
            from bitwright.ops.interpret import run

            return run(self.graph, feeds, states=self.engine.states, observe=observe)
        return self.engine.run(feeds, out)

    def _feeds(self, inputs: Any, positional: tuple[Any, ...]) -> Mapping[str, Any]:
        if not positional and (type(inputs) is dict or isinstance(inputs, Mapping)):
            return inputs  # type: ignore[no-any-return]
        values = positional if inputs is None else (inputs, *positional)
        if len(values) > len(self.input_names):
            raise RunError(
                "too many inputs are given",
                expected=f"{len(self.input_names)} ({', '.join(self.input_names)})",
                found=len(values),
            )
        return dict(zip(self.input_names, values, strict=False))

    def reset(self) -> None:
        """Forget all state: the next run starts from the initial values."""
        self.engine.states.clear()

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self.run(*args, **kwargs)
