"""The user's names of inputs, outputs and sizes of inputs.

A nested value is named by its path: `batch.tokens`, `output.0`.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch.export import Dim
from torch.utils import _pytree as pytree

Path = tuple[str, ...]


def _paths(spec: pytree.TreeSpec) -> list[Path]:
    """The path of each leaf of a tree, in flat order."""
    tree = pytree.tree_unflatten(range(spec.num_leaves), spec)
    found, _ = pytree.tree_flatten_with_path(tree)
    return [tuple(_step(key) for key in path) for path, _ in found]


def _step(key: Any) -> str:
    for attribute in ("idx", "key", "name"):  # of a sequence, a mapping, an attribute
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def input_paths(spec: pytree.TreeSpec, bound: inspect.BoundArguments) -> list[Path]:
    """The path of each flat input in the call, starting with the name of its parameter."""
    parameters = bound.signature.parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [p.name for p in parameters if p.kind in kinds]
    rest = next((p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL), "args")
    found: list[Path] = []
    for group, first, *steps in _paths(spec):
        if group == "1":  # by keyword
            head: Path = (first,)
        elif int(first) < len(positional):
            head = (positional[int(first)],)
        else:
            head = (rest, str(int(first) - len(positional)))
        found.append((*head, *steps))
    return found


def output_names(spec: pytree.TreeSpec) -> list[str]:
    """A name for each flat output; those of a dict or dataclass are its keys."""
    names = []
    for path in _paths(spec):
        keyed = bool(path) and not path[0].isdigit()
        names.append(".".join(path if keyed else ("output", *path)))
    return names


def size_names(paths: Sequence[Path], shapes: Any, arguments: list[str]) -> list[dict[int, str]]:
    """The names that a `dynamic_shapes` specification gives to the axes of each input."""
    if isinstance(shapes, (list, tuple)):
        shapes = dict(zip(arguments, shapes, strict=False))
    if not isinstance(shapes, dict):
        return [{} for _ in paths]
    return [_axis_names(_at(shapes, path)) for path in paths]


def _at(spec: Any, path: Path) -> Any:
    """The part of a specification for one input, or None."""
    for step in path:
        if isinstance(spec, dict):
            keys = {str(key): value for key, value in spec.items()}
            spec = keys.get(step)
        elif isinstance(spec, (list, tuple)) and step.isdigit() and int(step) < len(spec):
            spec = spec[int(step)]
        else:
            return None
    return spec


def _axis_names(spec: Any) -> dict[int, str]:
    if isinstance(spec, dict):
        sizes = list(spec.items())
    elif isinstance(spec, (list, tuple)):
        sizes = list(enumerate(spec))
    else:
        return {}
    named = [(axis, _name(size)) for axis, size in sizes if isinstance(axis, int)]
    return {axis: name for axis, name in named if name}


def _name(size: Any) -> str:
    """The name of a size, or of the one that it is derived from."""
    if isinstance(size, str):
        return size
    root = getattr(size, "root", size)
    return root.__name__ if type(root) is Dim else ""
