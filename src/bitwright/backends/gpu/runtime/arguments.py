"""The caller's inputs and outputs: numpy arrays, torch tensors, or anything with DLPack."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from bitwright.backends.gpu.lowering.artifact import GpuArtifact
from bitwright.backends.gpu.requirements import load_torch
from bitwright.backends.gpu.runtime.tensors import to_array
from bitwright.backends.outputs import check_out
from bitwright.errors import NonFiniteError, RunError
from bitwright.ir.arrays import as_array, element_of_torch
from bitwright.ir.dtype import string
from bitwright.ir.feeds import bind_input
from bitwright.ir.graph import Graph, Value
from bitwright.ir.types import TensorType

if TYPE_CHECKING:
    from bitwright.backends.gpu.runtime.prepared import PreparedRun
    from bitwright.backends.gpu.runtime.program import GpuProgram

Array = np.ndarray[Any, Any]


@dataclass
class Given:
    """The inputs of one run."""

    signature: Any
    bindings: dict[str, int] = field(default_factory=dict)
    raw: dict[str, Any] = field(default_factory=dict)
    """Bytes by input name, on the host or the device."""
    objects: dict[Value, Any] = field(default_factory=dict)
    """Inputs that are not tensors of numbers."""
    as_tensors: bool = False
    """Whether the caller gave torch tensors and gets them back."""
    on_device: bool = False
    """Whether one of these tensors is on the device; the results are then there too."""


def read_inputs(graph: Graph, feeds: Mapping[str, Any], device: Any) -> Given:
    """The inputs, checked against the graph's types."""
    torch = load_torch()
    given = Given(None)
    stand_ins: list[tuple[Value, Any]] = []
    for value in graph.inputs:
        item = feeds[value.name]
        if not isinstance(value.type, TensorType) or value.dtype == string:
            given.objects[value] = item
            continue
        tensor = _tensor(item, torch)
        if tensor is not None:
            given.as_tensors = True
            given.on_device |= tensor.device == device
            _check_device(value.name, tensor, device)
            element = element_of_torch(tensor.dtype).numpy
            stand_ins.append((value, np.broadcast_to(np.zeros((), element), tuple(tensor.shape))))
            flat = tensor.detach().resolve_conj().contiguous().reshape(-1)
            given.raw[value.name] = flat.view(torch.uint8) if flat.numel() else flat
        else:
            array = as_array(item)
            stand_ins.append((value, array))
            flat_array = np.ascontiguousarray(array).reshape(-1)
            given.raw[value.name] = _host_bytes(flat_array, torch)
    for _ in range(2):  # the second pass checks sizes that a later input binds
        for value, array in stand_ins:
            bind_input(value, array, given.bindings)
    given.signature = tuple((array.dtype, array.shape) for _, array in stand_ins)
    return given


def _host_bytes(array: Array, torch: Any) -> Any:
    data = array.view(np.uint8) if array.size else np.empty(0, np.uint8)
    return torch.from_numpy(data if data.flags.writeable else data.copy())


def _tensor(item: Any, torch: Any) -> Any:
    """A torch tensor of an item that is one or has DLPack; None for an array."""
    if isinstance(item, torch.Tensor):
        return item
    if isinstance(item, np.ndarray) or not hasattr(item, "__dlpack__"):
        return None
    return torch.from_dlpack(item)


def _check_device(name: str, tensor: Any, device: Any) -> None:
    if tensor.device != device and tensor.device.type != "cpu":
        raise RunError(
            "is on another device",
            where=f"input {name!r}",
            expected=str(device),
            found=str(tensor.device),
            hint=f"Move it with .to('{device}').",
        )
    if tensor.layout != load_torch().strided:
        raise RunError(
            "is not a dense tensor",
            where=f"input {name!r}",
            expected="torch.strided",
            found=str(tensor.layout),
            hint="Convert it with .to_dense().",
        )


class Results:
    """The outputs of one run."""

    def __init__(self, program: GpuProgram, run: PreparedRun, given: Given) -> None:
        self.program, self.run, self.given = program, run, given

    def collect(self, out: Mapping[str, Any]) -> dict[str, Any]:
        """All outputs by name; the caller owns them."""
        found: dict[str, Any] = {}
        for name, value in self.program.graph.outputs:
            view = self.program.schedule.outputs.get(name)
            if view is None:
                found[name] = self.run.objects[value]
                continue
            shape = self.run.memory.shape(view)
            flat = self.run.memory.tensor(view)[: int(np.prod(shape, dtype=np.int64))]
            if self.given.as_tensors and name not in out:
                made = flat.clone() if self.given.on_device else flat.cpu().clone()
                found[name] = made.reshape(shape)
            else:
                array = to_array(flat.view(load_torch().uint8), view.dtype, shape)
                found[name] = self._delivered(name, array, out)
        if not self.given.on_device:
            self.program.device.synchronize_stream()
            self.program.raise_fault(self.run.memory.bindings)
        return found

    def _delivered(self, name: str, array: Array, out: Mapping[str, Any]) -> Any:
        if name in out:
            check_out(name, out[name], array.shape, array.dtype)
            out[name][...] = array
            return out[name]
        return array.copy() if self.program.device.is_interpreted else array


def fault_error(artifact: GpuArtifact, raw: Any, bindings: Mapping[str, int]) -> RunError | None:
    """The error that a kernel recorded in the fault buffer."""
    if not artifact.faults:
        return None
    number, index = (int(v) for v in raw[:16].cpu().numpy().view(np.int64))
    if number == 0:
        return None
    fault = artifact.faults[number]
    if fault.parameter:
        return NonFiniteError(f"the gradient of {fault.parameter!r} is not finite")
    expected = None
    if fault.indexed is not None:
        expected = f"an index of a tensor of shape {list(fault.indexed.concrete(bindings))}"
    return RunError(f"index {index} is outside", where=fault.where, expected=expected)
