"""`bw.from_torch`: a PyTorch module, traced by `torch.export`, as a graph.

    graph = bw.from_torch(module, (x,), dynamic_shapes={"x": {0: "batch"}})

Parameters keep the names they have in the module and share memory with it. Buffers are parameters
that are not trainable, states where the module changes them, or constants where it does not save
them. PyTorch is imported when this is called and nowhere else.
"""

from __future__ import annotations

import importlib
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
    place appears among the outputs as `name.updated`.
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


def require_torch() -> None:
    """Raise an error that says what to install where PyTorch is missing."""
    try:
        importlib.import_module("torch")
    except ImportError as error:
        raise ImportModelError(
            f"PyTorch cannot be imported: {error}", hint="pip install bitwright[torch]"
        ) from None
