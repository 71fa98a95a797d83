"""A compiled model: `exe.run({"x": array})` gives a dict of arrays in output order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from bitwright.errors import RunError
from bitwright.ir.graph import Graph
from bitwright.ops.interpret import Observer, run
from bitwright.passes.manager import History

Array = np.ndarray[Any, Any]


class Executable:
    """Runs a graph. Named state lives in the executable, across runs, until `reset`."""

    def __init__(self, graph: Graph, history: History) -> None:
        self.graph, self.history = graph, history
        self._states: dict[str, Array] = {}

    @property
    def input_names(self) -> tuple[str, ...]:
        return tuple(value.name for value in self.graph.inputs)

    @property
    def output_names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.graph.outputs)

    def run(
        self,
        inputs: Mapping[str, Any] | None = None,
        /,
        *positional: Any,
        observe: Observer | None = None,
    ) -> dict[str, Any]:
        """Outputs by name, from inputs by name or in order; the arrays are the caller's own."""
        feeds = self._feeds(inputs, positional)
        results = run(self.graph, feeds, states=self._states, observe=observe)
        given = [a for a in (*feeds.values(), *self._held()) if isinstance(a, np.ndarray)]
        owned: dict[str, Any] = {}
        for name, result in results.items():
            shared = isinstance(result, np.ndarray) and any(
                np.may_share_memory(result, array)
                for array in (*given, *owned.values())
                if isinstance(array, np.ndarray)
            )
            owned[name] = result.copy() if shared else result
        return owned

    def _held(self) -> list[Any]:
        """Arrays that outlive a run and must not be handed out."""
        boundary = (*self.graph.constants, *self.graph.parameters)
        return [v.node.attrs.get("value") for v in boundary] + list(self._states.values())

    def _feeds(self, inputs: Any, positional: tuple[Any, ...]) -> Mapping[str, Any]:
        if isinstance(inputs, Mapping) and not positional:
            return inputs
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
        self._states.clear()

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self.run(*args, **kwargs)
