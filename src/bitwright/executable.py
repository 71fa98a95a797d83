"""A compiled model: `exe.run({"x": array})` returns a dict of arrays in output order."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from bitwright.backends.base import Engine
from bitwright.backends.outputs import check_distinct
from bitwright.errors import BitwrightError, RunError
from bitwright.ir.feeds import check_inputs
from bitwright.ir.graph import Graph
from bitwright.ir.types import ValueType

if TYPE_CHECKING:  # slow to import, and a run needs neither
    from bitwright.ops.core.interpret import Observer
    from bitwright.passes.manager import History

Array = np.ndarray[Any, Any]


class Recipe(Protocol):
    """How another process reconstructs an executable."""

    def reconstruct(self) -> tuple[Any, tuple[Any, ...]]:
        """A function and its arguments, all picklable."""
        ...


class RunObserver(Protocol):
    """Wraps the runs of an engine (`drift.monitor`)."""

    def run(
        self, engine: Engine, feeds: Mapping[str, Any], out: Mapping[str, Array] | None
    ) -> dict[str, Any]: ...


MONITOR = "bitwright.drift.monitor"
"""The module that makes monitors; it is imported on first use."""


class Executable:
    """Runs a graph. Named state persists across runs until `reset`.

    `interface` is a graph with the same inputs and outputs; it may lack the nodes between them.
    A copy shares the compiled code and has its own states. A pickle holds the model, which is
    compiled again on loading (`recipe`).
    """

    recipe: Recipe | None = None
    _monitor: RunObserver | None = None

    def __init__(self, graph: Graph, history: History, engine: Engine) -> None:
        self.graph, self.history, self.engine = graph, history, engine
        self._present(graph)

    def _present(self, interface: Graph) -> None:
        self.interface = interface
        self.input_names = tuple(value.name for value in interface.inputs)
        self.output_names = tuple(name for name, _ in interface.outputs)
        self._wanted = frozenset(self.input_names)

    @property
    def inputs(self) -> dict[str, ValueType]:
        """The type of each input by name; a tensor type has `dtype` and `shape`."""
        return {value.name: value.type for value in self.interface.inputs}

    @property
    def outputs(self) -> dict[str, ValueType]:
        """The type of each output by name."""
        return {name: value.type for name, value in self.interface.outputs}

    def run(
        self,
        inputs: Mapping[str, Any] | None = None,
        /,
        *positional: Any,
        out: Mapping[str, Array] | None = None,
        observe: Observer | None = None,
    ) -> dict[str, Any]:
        """Outputs by name, from inputs by name or in order. The caller owns the arrays.

        Arrays in `out` (by output name) are written in place; no two of them may share memory.
        Concurrent runs are serialized. A nested run, such as one that a custom op starts, uses
        separate memory; it is an error if the executable has state. With `observe`, the reference
        interpreter runs the graph and reports every value.
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
            from bitwright.ops.core.interpret import run

            states = dict(self.engine.states)
            found = run(self.graph, feeds, states=states, observe=observe)
            # The caller may own a new state: an input, or an array that `observe` got.
            self.engine.states.update({name: array.copy() for name, array in states.items()})
            return found
        if self._monitor is not None:
            return self._monitor.run(self.engine, feeds, out)
        return self.engine.run(feeds, out)

    def monitor(self, **options: Any) -> Any:
        """A `drift.monitor.Monitor` that observes some of the runs and says when data drifts.

        `every=N` observes every Nth run, `fraction=p` (with `seed`) each run with probability p.
        Without both, runs are observed so often that counting takes `budget` (0.01) of the time
        of all runs. Further options: `on_alarm`, a function that gets
        each alarm; `level`, the probability that any false alarm is ever raised (0.01);
        `tolerance`, the additional clipped fraction that is allowed (0.001); `load`, a file that
        `save` wrote.
        """
        return importlib.import_module(MONITOR).monitor(self, **options)

    def set_monitor(self, monitor: RunObserver) -> None:
        """Pass all runs through a monitor; an executable has one at a time."""
        if self._monitor is not None:
            raise BitwrightError(
                "the executable already has a monitor", hint="Close the other one first."
            )
        self._monitor = monitor

    def remove_monitor(self, monitor: RunObserver) -> None:
        if self._monitor is monitor:
            self._monitor = None

    def _feeds(self, inputs: Any, positional: tuple[Any, ...]) -> Mapping[str, Any]:
        if not positional and (type(inputs) is dict or isinstance(inputs, Mapping)):
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
        """Clear all state; the next run starts from the initial values."""
        self.engine.states.clear()

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """`run`, with inputs also as keyword arguments: `exe(image=x)`."""
        own = {"out", "observe"} - self._wanted
        options = {name: kwargs.pop(name) for name in own & kwargs.keys()}
        if not kwargs:
            return self.run(*args, **options)
        feeds = self._feeds(args[0], args[1:]) if args else {}
        if twice := feeds.keys() & kwargs.keys():
            raise RunError(f"input {min(twice)!r} is given twice")
        return self.run({**feeds, **kwargs}, **options)

    def __copy__(self) -> Self:
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin.engine = self.engine.copy()
        return twin

    def __deepcopy__(self, memo: Any) -> Self:
        return self.__copy__()

    def __reduce__(self) -> Any:
        if self.recipe is None:
            raise BitwrightError(
                "this executable cannot be pickled: it was not made by bw.compile",
                hint="Pickle or save its graph, and compile that.",
            )
        make, arguments = self.recipe.reconstruct()
        states = {name: array.copy() for name, array in self.engine.states.items()}
        return make, arguments, states or None

    def __setstate__(self, states: dict[str, Array]) -> None:
        self.engine.states.update(states)

    def __repr__(self) -> str:
        facts = self.interface.interface_text
        return f"<executable {self.interface.name!r} {self.engine.description}: {facts}>"

    def _repr_html_(self) -> str:
        from bitwright.ir.html import table

        return table(
            f"executable {self.interface.name} {self.engine.description}",
            ("", "name", "type"),
            [
                *(("input", name, type_) for name, type_ in self.inputs.items()),
                *(("output", name, type_) for name, type_ in self.outputs.items()),
            ],
        )
