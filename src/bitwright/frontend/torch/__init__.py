"""`bw.from_torch`: a PyTorch module, traced by `torch.export`, as a graph.

    graph = bw.from_torch(module, (x,), dynamic_shapes={"x": {0: "batch"}})

Parameters keep their names in the module and share memory with it. A buffer becomes a parameter
that is not trainable, a state if the module changes it, or a constant if it is not persistent.
PyTorch is imported only when these functions are called.
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
    `forward`, nested ones as `name.key`. A single output is named `output`, several `output.0`,
    `output.1`, …; those of a dict or dataclass have its keys. An input that the module changes in
    place adds the output `name.updated`. A module in training mode is traced in that mode, with a
    warning.
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
    graph: Graph = program.import_program(traced, name or type(module).__name__)
    return graph


def is_module(model: Any) -> bool:
    """Whether this is a `torch.nn.Module`."""
    torch: Any = sys.modules.get("torch")  # a module exists only if torch is imported
    return torch is not None and isinstance(model, torch.nn.Module)


def from_module(module: Any, batches: Sequence[Any] = ()) -> Graph:
    """The graph of a module, traced with these batches, or with the module's own examples.

    Those are `example_input_array` of Lightning and `dummy_inputs` of transformers.
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
    graph: Graph = examples.trace_with(module, found)
    return graph


def is_program(model: Any) -> bool:
    """Whether this is an `ExportedProgram`."""
    export: Any = sys.modules.get("torch.export")
    return export is not None and isinstance(model, export.ExportedProgram)


def require_torch() -> None:
    """Raise an error with an installation hint if PyTorch is missing."""
    try:
        importlib.import_module("torch")
    except ImportError as error:
        raise ImportModelError(
            f"PyTorch cannot be imported: {error}", hint="pip install bitwright[torch]"
        ) from None
