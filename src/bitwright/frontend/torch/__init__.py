"""`bw.from_torch`: a PyTorch module, traced by `torch.export`, as a graph.

    graph = bw.from_torch(module, (x,), dynamic_shapes={"x": {0: "batch"}})

Parameters keep the names they have in the module and share memory with it. Buffers are parameters
that are not trainable, states where the module changes them, or constants where it does not save
them. PyTorch is imported when this is called and nowhere else.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from bitwright.errors import ImportModelError
from bitwright.ir.graph import Graph


def from_torch(
    module: Any,
    example_args: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    name: str | None = None,
) -> Graph:
    """The graph of a `torch.nn.Module`, or of an `ExportedProgram` (which needs no examples).

    `dynamic_shapes` is what `torch.export.export` takes; a size may also be a plain name, as in
    `{"x": {0: "batch"}}`, and torch then finds its range. Inputs are named as the parameters of
    `forward`, what is nested in one as `name.key`. The output is `output`, several are `output.0`,
    `output.1`, …; those of a dict or dataclass have its keys. An input that the module changes in
    place appears among the outputs as `name.updated`. A module that is still in training mode is
    traced so, with a warning.
    """
    if isinstance(example_args, (str, bytes)) or not isinstance(example_args, Sequence):
        raise ImportModelError(
            "example_args are not a tuple of arguments",
            expected="(x,) even for one argument",
            found=type(example_args).__name__,
        )
    require_torch()
    trace = importlib.import_module("bitwright.frontend.torch.trace")
    program = importlib.import_module("bitwright.frontend.torch.program")
    traced = trace.trace(module, tuple(example_args), dict(example_kwargs or {}), dynamic_shapes)
    return program.import_program(traced, name or type(module).__name__)


def is_module(model: Any) -> bool:
    """Whether this is a `torch.nn.Module`, which has no graph until it is traced."""
    torch: Any = sys.modules.get("torch")  # whoever has a module has imported it
    return torch is not None and isinstance(model, torch.nn.Module)


def from_module(module: Any, batches: Sequence[Any] = ()) -> Graph:
    """The graph of a module, traced with batches of its data, or with examples of its own.

    Lightning keeps examples in `example_input_array`, transformers in `dummy_inputs`.
    """
    found = batches
    for name in ("example_input_array", "dummy_inputs"):
        own = getattr(module, name, None)
        found = found or ([] if own is None else [own])
    if not found:
        raise ImportModelError(
            "a PyTorch module has no graph until it is traced",
            found=type(module).__name__,
            hint="bw.from_torch(module, (x,)) traces it with example inputs and gives the graph; "
            "bw.quantize and bw.calibrate take examples from their data.",
        )
    examples = importlib.import_module("bitwright.frontend.torch.examples")
    return examples.trace_with(module, found)  # type: ignore[no-any-return]


def is_program(model: Any) -> bool:
    """Whether this is an `ExportedProgram`."""
    export: Any = sys.modules.get("torch.export")
    return export is not None and isinstance(model, export.ExportedProgram)


def require_torch() -> None:
    """Raise an error that says what to install where PyTorch is missing."""
    try:
        importlib.import_module("torch")
    except ImportError as error:
        raise ImportModelError(
            f"PyTorch cannot be imported: {error}", hint="pip install bitwright[torch]"
        ) from None
