"""Runs whose inputs and results are tensors on the device, with as little work on the host as
possible: copies in, one CUDA graph, copies out.

A program makes a `DirectRun` from a prepared run that is one captured graph. It is found again by
the inputs' types and shapes, so nothing is checked or looked up by name in a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from bitwright.backends.gpu.requirements import load_torch
from bitwright.backends.gpu.runtime.tensors import typed

if TYPE_CHECKING:
    from bitwright.backends.gpu.runtime.prepared import PreparedRun
    from bitwright.backends.gpu.runtime.program import GpuProgram


class DirectRun:
    """One captured graph with the places of its inputs and outputs."""

    def __init__(
        self,
        replay: Callable[[], None],
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        bindings: Mapping[str, int],
        signature: Any,
    ) -> None:
        self.bindings, self.signature = dict(bindings), signature
        self.replay, self._inputs = replay, tuple(inputs.values())
        self._outputs = tuple(outputs.items())
        self._single = self._inputs[0] if len(self._inputs) == 1 else None
        self._copy_all = load_torch()._foreach_copy_

    @classmethod
    def of(
        cls, program: GpuProgram, run: PreparedRun, signature: Any, feeds: Mapping[str, Any]
    ) -> DirectRun | None:
        """The direct form of the prepared run of a signature; None while it has none."""
        replay = run.whole_graph
        if replay is None or len(program.schedule.outputs) != len(program.graph.outputs):
            return None
        with load_torch().inference_mode(False):  # runs outside of the caller's mode write to them
            inputs, outputs = cls._tensors(program, run, feeds)
        return cls(replay, inputs, outputs, run.memory.bindings, signature)

    @staticmethod
    def _tensors(
        program: GpuProgram, run: PreparedRun, feeds: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The inputs and outputs in the run's memory."""
        memory = run.memory
        buffers = {b.name: b for b in program.input_buffers}
        inputs = {}
        for value in program.graph.inputs:
            given = feeds[value.name]
            flat = typed(memory.raw(buffers[value.name]), 0, value.dtype)
            inputs[value.name] = flat[: given.numel()].view(given.dtype).view(given.shape)
        outputs = {}
        for name, _ in program.graph.outputs:
            view = program.schedule.outputs[name]
            shape = memory.shape(view)
            count = 1
            for size in shape:
                count *= size
            outputs[name] = memory.tensor(view)[:count].view(shape)
        return inputs, outputs

    def run(self, tensors: list[Any]) -> dict[str, Any]:
        """New tensors by name; `tensors` are the inputs in the graph's order."""
        self.fill(tensors)
        self.replay()
        return self.results()

    def fill(self, tensors: list[Any]) -> None:
        """Copy the inputs into the graph's buffers."""
        if self._single is not None:
            self._single.copy_(tensors[0])
        else:
            self._copy_all(self._inputs, tensors)

    def results(self) -> dict[str, Any]:
        """Copies of the outputs by name."""
        return {name: view.clone() for name, view in self._outputs}


def key_of(names: tuple[str, ...], feeds: Mapping[str, Any], device: Any) -> tuple[list[Any], Any]:
    """The inputs in order, and what a direct run is found by: types and shapes; no key if
    an input is not a plain tensor on the device."""
    torch = load_torch()
    plain, strided = torch.Tensor, torch.strided
    tensors: list[Any] = []
    key: list[Any] = []
    for name in names:
        given = feeds[name]
        if type(given) is not plain or given.device != device or given.layout != strided:
            return [], None
        if given.requires_grad:
            given = given.detach()
        tensors.append(given)
        key.append(given.dtype)
        key.append(given.shape)
    return tensors, tuple(key) or None
