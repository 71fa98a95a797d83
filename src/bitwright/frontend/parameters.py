"""Reads the values of a graph's parameters by name, and sets them from files or mappings.

    graph = load_parameters(graph, "model.safetensors")
    weights = parameters(graph)

The values of states are set too: a PyTorch state dict holds the buffers that a module changes, and
its values become their initial values.
"""

from __future__ import annotations

import importlib
import json
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bitwright.errors import GraphError, ImportModelError
from bitwright.frontend.safetensors import read_index, read_safetensors
from bitwright.ir.dtype import dtype, string
from bitwright.ir.graph import Graph, Node, Value, nearest
from bitwright.ir.types import TensorType
from bitwright.ops.math.cast import cast

Array = np.ndarray[Any, Any]

ALIASES = "parameter_aliases"
"""The key in `Graph.meta` of the aliases of tied parameters (JSON: alias to name)."""
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_SHOWN = 8


def parameters(graph: Graph) -> dict[str, Array]:
    """The value of every parameter that has one, by name; the arrays are not copied."""
    values = {v.name: v.node.attrs.get("value") for v in graph.parameters}
    return {name: value for name, value in values.items() if value is not None}


def load_parameters(
    graph: Graph, source: Any, *, strict: bool = True, convert: bool = False
) -> Graph:
    """The graph with values from a source for its parameters and states.

    `source` is a mapping of names to arrays or torch tensors (a state dict), another graph, or the
    path of a .safetensors, .npz or torch file. Missing, unknown and mis-shaped names are an error
    that lists them all; `strict=False` ignores the first two. Element types must agree unless
    `convert` is True. Arrays are not copied.
    """
    given = _without_aliases(graph, {name: _array(name, a) for name, a in _read(source).items()})
    owners = {v.name: v for v in (*graph.parameters, *graph.states)}
    faults: list[str] = []
    if strict:
        faults += _fault_lines(
            "missing", (v.name for v in graph.parameters if v.name not in given), given
        )
        faults += _fault_lines("unexpected", (n for n in given if n not in owners), owners)
    new: dict[str, Array] = {}
    for name, owner in owners.items():
        if name in given:
            new[name], fault = _convert(owner, given[name], convert)
            faults += [fault] if fault else []
    if faults:
        raise ImportModelError(
            "the values do not fit the parameters:\n  " + "\n  ".join(faults),
            where=f"graph {graph.name!r}",
            hint="strict=False loads what fits by name." if strict else "",
        )
    return _with_values(graph, new)


def _fault_lines(what: str, names: Iterable[str], others: Iterable[str]) -> list[str]:
    """One line with all names of a kind, and a suggestion for the first."""
    found = list(names)
    if not found:
        return []
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    hint = nearest(found[0], others)
    return [f"{what}: {', '.join(found[:_SHOWN])}{more}" + (f" ({hint})" if hint else "")]


def _convert(owner: Value, array: Array, convert: bool) -> tuple[Array, str]:
    """The array for a parameter, and why it does not fit, or ""."""
    expected, found = owner.tensor, TensorType(dtype(array.dtype), array.shape)
    if found.shape != expected.shape:
        return array, f"{owner.name}: expected {expected}, found {found}"
    if found.dtype == expected.dtype:
        return array, ""
    if not convert:
        hint = "convert=True converts it"
        return array, f"{owner.name}: expected {expected}, found {found}; {hint}"
    return cast(array, expected.dtype), ""


def _without_aliases(graph: Graph, given: dict[str, Array]) -> dict[str, Array]:
    """The values with aliases of tied parameters resolved to the names in the graph."""
    aliases = json.loads(graph.meta.get(ALIASES, "{}"))
    kept = {name: array for name, array in given.items() if name not in aliases}
    for alias, name in aliases.items():
        if alias not in given:
            continue
        if name in kept and not _same(kept[name], given[alias]):
            raise ImportModelError(
                f"parameters {name!r} and {alias!r} are one in graph {graph.name!r}, "
                "and the source has different values for them"
            )
        kept.setdefault(name, given[alias])
    return kept


def _same(one: Array, other: Array) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.ctypes.data == other.ctypes.data and one.strides == other.strides:
        return True
    return one.tobytes() == other.tobytes()


def _with_values(graph: Graph, new: Mapping[str, Array]) -> Graph:
    replaced: dict[Value, Value] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        changes: dict[str, Any] = {}
        inputs = tuple(None if v is None else replaced[v] for v in node.inputs)
        if inputs != node.inputs:
            changes["inputs"] = inputs
        if node.op in ("parameter", "state") and node.name in new:
            changes["attrs"] = {**node.attrs, "value": new[node.name]}
        nodes.append(node.with_(**changes) if changes else node)
        replaced.update(zip(node.outputs, nodes[-1].outputs, strict=True))
    return graph.with_(
        nodes=tuple(nodes),
        outputs=tuple((name, replaced[v]) for name, v in graph.outputs),
        updates=tuple((replaced[s], replaced[v]) for s, v in graph.updates),
    )


# sources


def _read(source: Any) -> Mapping[str, Any]:
    if isinstance(source, Graph):
        return parameters(source)
    if isinstance(source, Mapping):
        return source
    if not isinstance(source, (str, Path)):
        raise ImportModelError(
            "parameters cannot be read from this",
            expected="a path, a mapping of names to arrays, or a graph",
            found=type(source).__name__,
        )
    path = Path(source)
    if path.name.endswith(".safetensors"):
        return read_safetensors(path)
    if path.name.endswith(".index.json"):
        return read_index(path)
    if path.suffix == ".npz":
        return _read_npz(path)
    if path.suffix in _TORCH_SUFFIXES:
        return _read_torch(path)
    raise ImportModelError(
        f"no reader is known for {path.name!r}",
        expected=f".safetensors, .safetensors.index.json, .npz, {', '.join(_TORCH_SUFFIXES)}",
    )


def _read_npz(path: Path) -> dict[str, Array]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except Exception as error:  # zip, zlib and numpy raise types of their own
        raise ImportModelError(f"cannot read {path}: {error}") from None


def _read_torch(path: Path) -> Mapping[str, Any]:
    """A state dict; `weights_only` reads tensors and plain containers, and runs no code."""
    importlib.import_module("bitwright.frontend.torch").require_torch()
    torch: Any = importlib.import_module("torch")
    try:
        mapped = zipfile.is_zipfile(path)  # the old format cannot be mapped
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # pickle, zip and torch raise types of their own
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ImportModelError(f"cannot read {path}: {text}") from None
    if isinstance(found, Mapping) and isinstance(found.get("state_dict"), Mapping):
        found = found["state_dict"]
    if not isinstance(found, Mapping):
        raise ImportModelError(
            f"{path} holds no state dict", expected="a mapping", found=type(found).__name__
        )
    return found


def _array(name: str, value: Any) -> Array:
    """The value as an array; a torch tensor shares its memory."""
    if type(value).__module__.startswith("torch"):
        if not hasattr(value, "detach"):
            raise ImportModelError(f"{name!r} is a {type(value).__name__}", expected="a tensor")
        tensors = importlib.import_module("bitwright.frontend.torch.tensors")
        shared: Array = tensors.array_of(value)
        return shared
    try:
        array = np.asarray(value)
        element = dtype(array.dtype)
    except (ValueError, TypeError, GraphError) as error:
        raise ImportModelError(f"{name!r} is not an array: {error}") from None
    if element == string:
        raise ImportModelError(f"{name!r} is not an array of numbers", found=type(value).__name__)
    return array
