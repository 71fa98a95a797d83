"""Traces a module to a program of mapped ATen ops: `torch.export`, then decomposition."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import Dim, ExportedProgram

from bitwright.errors import BitwrightError, ImportModelError
from bitwright.frontend.torch.composites import whole_composites
from bitwright.frontend.torch.names import input_paths, size_names
from bitwright.frontend.torch.registry import all_mappings
from bitwright.warn import BitwrightWarning

_MESSAGE_LINES = 12
_NAMES_SHOWN = 3
_RANGE_HINT = 'A size given by name, as in {0: "batch"}, takes whatever range the module allows.'


@dataclass(frozen=True)
class Traced:
    program: ExportedProgram
    input_names: list[str]
    """The names of all flat inputs, in the order of the program's signature."""
    size_names: list[dict[int, str]]
    """The names that the caller gave to axes of each flat input."""


def trace(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Any) -> Traced:
    """The exported and decomposed program; torch's exceptions become `ImportModelError`."""
    if isinstance(module, ExportedProgram):
        program = _with_import_errors(lambda: _decompose(module))
        names = list(program.graph_signature.user_inputs)
        return Traced(program, [str(name) for name in names], [{} for _ in names])
    if not isinstance(module, torch.nn.Module):
        raise ImportModelError(
            "from_torch takes a module", expected="torch.nn.Module", found=type(module).__name__
        )
    _warn_of_training(module)
    if hasattr(shapes, "dynamic_shapes"):  # a ShapesCollection, or AdditionalInputs
        shapes = _with_import_errors(lambda: shapes.dynamic_shapes(module, args, kwargs))
    program = _with_import_errors(lambda: _export(module, args, kwargs, shapes))
    try:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise ImportModelError(f"the example arguments do not fit forward: {error}") from None
    paths = input_paths(program.call_spec.in_spec, bound)
    names = [".".join(path) for path in paths]
    return Traced(program, names, size_names(paths, shapes, list(bound.arguments)))


def _warn_of_training(module: torch.nn.Module) -> None:
    """Warn of modules in training mode, where dropout and batch norm compute other results."""
    training = {name: part for name, part in module.named_modules() if part.training}
    if not training:
        return
    kinds = (torch.nn.modules.dropout._DropoutNd, torch.nn.modules.batchnorm._NormBase)
    telling = [name or "the module" for name, part in training.items() if isinstance(part, kinds)]
    names = telling or [name or "the module" for name in training]
    more = ", …" if len(names) > _NAMES_SHOWN else ""
    warnings.warn(
        f"the module is in training mode ({', '.join(names[:_NAMES_SHOWN])}{more}): call "
        "module.eval() before the import, unless that is intended",
        BitwrightWarning,
        stacklevel=4,
    )


def _with_import_errors(action: Any) -> Any:
    try:
        return action()
    except BitwrightError:
        raise
    except Exception as error:  # torch raises many unrelated types
        text = str(error).partition("\n\nThe error above")[0].strip()
        lines = text.splitlines() or [type(error).__name__]
        more = [] if len(lines) <= _MESSAGE_LINES else ["…"]
        raise ImportModelError(
            "torch.export cannot trace the module: " + "\n".join(lines[:_MESSAGE_LINES] + more),
            hint=_RANGE_HINT if "Suggested fixes" in text else "",
        ) from error


def _export(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Any
) -> ExportedProgram:
    with _ignore_warnings(), whole_composites():
        program = torch.export.export(module, args, kwargs, dynamic_shapes=_dims(shapes))
    return _decompose(program)


def _decompose(program: ExportedProgram) -> ExportedProgram:
    with _ignore_warnings(), whole_composites():
        decomposed: ExportedProgram = program.run_decompositions(_decompositions())
        return decomposed


@contextmanager
def _ignore_warnings() -> Iterator[None]:
    """Suppress the warnings of torch about its own code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", message=".*_flat_weights.*")
        yield


def _dims(shapes: Any) -> Any:
    """The specification with `Dim.DYNAMIC` in place of names."""
    if isinstance(shapes, str):
        return Dim.DYNAMIC
    if isinstance(shapes, dict):
        return {key: _dims(value) for key, value in shapes.items()}
    if type(shapes) in (list, tuple):
        return type(shapes)(_dims(value) for value in shapes)
    return shapes


def _decompositions() -> dict[Any, Any]:
    """The decompositions of the ops that have no mapping."""
    mapped = all_mappings()
    table = torch.export.default_decompositions()
    for op in [op for op in table if str(op) in mapped]:
        del table[op]
    for op, function in torch._decomp.decomposition_table.items():
        if str(op) not in mapped and op not in table:
            table[op] = function
    return table
