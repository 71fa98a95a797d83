"""The compiled programs of a trainer over one set of states.

    last    forward, backward and optimizer
    first   forward and backward into accumulators, with accumulation over several batches
    eval    outputs, loss and metrics in evaluation form, with the weights or their averages

All of them read and write the same arrays, by the names of states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from bitwright import system
from bitwright.backends.cpu.runtime.memory import new_array
from bitwright.errors import GraphError, TrainingError
from bitwright.executable import Executable
from bitwright.ir.arrays import Array
from bitwright.ir.graph import Graph
from bitwright.pipeline import compile_graph, compile_step
from bitwright.train.losses import TEACHER, Loss
from bitwright.train.modes import eval_mode
from bitwright.train.optimizers import PREFIX
from bitwright.train.step import (
    AVERAGE,
    LOSS,
    NORM,
    RATE,
    SUM,
    Settings,
    eval_graph,
    simplified,
    step_graph,
)

Batch = Mapping[str, Array]


class StepProgram:
    """Runs training steps and evaluations of one graph."""

    def __init__(
        self,
        graph: Graph,
        loss: Loss,
        settings: Settings,
        target: str = "cpu",
        threads: int | None = None,
    ) -> None:
        self.loss, self.settings = loss, settings
        self.target, self.threads = target, threads
        self.simple = simplified(graph)
        try:
            self.last_graph = step_graph(self.simple, loss, settings)
            self.first_graph = (
                step_graph(self.simple, loss, settings, is_last=False)
                if settings.accumulate > 1
                else None
            )
        except GraphError as error:
            raise TrainingError(f"graph {graph.name!r} cannot be trained: {error}") from None
        self.states: dict[str, Array] = {}
        for made in (self.last_graph, self.first_graph):
            if made is not None:
                _initialize(made, self.states)

    @property
    def weights(self) -> list[str]:
        """The states that belong to the model: parameters, running statistics, observers."""
        return [name for name in self.states if not name.startswith(PREFIX)]

    @cached_property
    def _last(self) -> Executable:
        return self._compiled(self.last_graph)

    @cached_property
    def _first(self) -> Executable:
        assert self.first_graph is not None
        return self._compiled(self.first_graph)

    @cached_property
    def _eval(self) -> Executable:
        return self._compiled(self._eval_graph(self.loss))

    @cached_property
    def _predict(self) -> Executable:
        return self._compiled(self._eval_graph(None))

    def _eval_graph(self, loss: Loss | None) -> Graph:
        return eval_graph(self.simple, loss, self.weights, self.settings.passes)

    def _compiled(self, graph: Graph) -> Executable:
        exe = compile_step(graph, self.target, self.threads)
        exe.engine.states = self.states
        system.trim_memory(collect=False)  # of passes and code generation
        return exe

    def run(self, batches: Sequence[Batch], rate: float) -> dict[str, float]:
        """One step over the batches that it accumulates: the mean loss, and the norm if known."""
        losses = []
        for batch in batches[:-1]:
            losses.append(float(self._first.run(batch)[LOSS]))
            if not np.isfinite(losses[-1]) and self.settings.precision != "f16":
                return {LOSS: losses[-1]}  # in f16 the last one skips the step and clears the sums
        found = self._last.run({**batches[-1], RATE: np.float32(rate)})
        losses.append(float(found[LOSS]))
        result = {LOSS: float(np.mean(losses))}
        if NORM in found:
            result[NORM] = float(found[NORM])
        return result

    def evaluate(self, batch: Batch, averaged: bool) -> dict[str, float]:
        """The loss and the metrics of one batch in evaluation form."""
        exe = self._eval
        exe.engine.states = self.model_states(averaged)
        found = exe.run({name: batch[name] for name in exe.input_names})
        return {
            name.removeprefix(PREFIX): float(array)
            for name, array in found.items()
            if name.startswith(PREFIX)
        }

    def predict(self, batch: Batch, averaged: bool) -> dict[str, Array]:
        """The outputs of the model in evaluation form."""
        exe = self._predict
        exe.engine.states = self.model_states(averaged)
        return exe.run({name: batch[name] for name in exe.input_names if name in batch})

    def model_states(self, averaged: bool) -> dict[str, Array]:
        """The states of the model by name; with `averaged`, averages in place of weights."""
        found = {name: self.states[name] for name in self.weights}
        if averaged:
            found |= {
                name: self.states[AVERAGE + name] for name in found if AVERAGE + name in self.states
            }
        return found

    def clear_sums(self) -> None:
        """Remove the gradients that an unfinished step left in the accumulators."""
        for name, array in self.states.items():
            if name.startswith(SUM):
                array[...] = 0

    def nonfinite_weight(self) -> str:
        """The first trained parameter that holds NaN or infinity, or ""."""
        for name in self.weights:
            array = self.states[name]
            if array.dtype.kind not in "iub" and not np.isfinite(array).all():
                return name
        return ""

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Set all states, in place."""
        if missing := sorted(self.states.keys() ^ arrays.keys()):
            raise TrainingError(
                f"the checkpoint and the trainer have different states: {missing[0]!r}"
            )
        for name, array in self.states.items():
            given = arrays[name]
            if given.shape != array.shape or given.dtype != array.dtype:
                raise TrainingError(
                    f"state {name!r} of the checkpoint has another type",
                    expected=f"{array.dtype}{list(array.shape)}",
                    found=f"{given.dtype}{list(given.shape)}",
                )
        for name in self.states:
            self.states[name][...] = arrays[name]


def _initialize(graph: Graph, states: dict[str, Array]) -> None:
    """Add the initial values of a graph's states."""
    for value in graph.states:
        if value.name in states:
            continue
        initial = value.node.attrs.get("value")
        shape = value.tensor.concrete({})
        array = new_array(shape, value.dtype.numpy)
        array[...] = 0 if initial is None else initial
        states[value.name] = array


class Teacher:
    """A float model whose outputs are the targets of a distillation."""

    def __init__(self, graph: Graph, outputs: Sequence[str], target: str, threads: int | None):
        self.outputs = tuple(outputs)
        wanted = tuple((name, value) for name, value in graph.outputs if name in self.outputs)
        self.exe = compile_graph(eval_mode(graph.with_(outputs=wanted)), target, threads)

    def require_inputs(self, graph: Graph) -> None:
        """Raise a `TrainingError` if the teacher has an input that the graph does not have."""
        names = [value.name for value in graph.inputs]
        for name in self.exe.input_names:
            if name not in names:
                raise TrainingError(
                    f"the teacher has an input {name!r} that the graph does not have",
                    expected=", ".join(map(repr, names)),
                )

    def add_targets(self, batch: Batch) -> dict[str, Array]:
        """The batch with the teacher's outputs."""
        found = self.exe.run({name: batch[name] for name in self.exe.input_names})
        targets = {TEACHER + name: np.asarray(found[name], np.float32) for name in self.outputs}
        return {**batch, **targets}
