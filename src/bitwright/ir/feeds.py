"""What a caller feeds into a graph, held against the inputs that the graph declares."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from bitwright.errors import RunError
from bitwright.ir.arrays import as_array
from bitwright.ir.dim import Dim, Size, evaluate
from bitwright.ir.dtype import dtype
from bitwright.ir.graph import Graph, Value, nearest
from bitwright.ir.types import TensorType


def check_inputs(graph: Graph, inputs: Mapping[str, Any]) -> None:
    """Name what is missing or unknown."""
    names = [v.name for v in graph.inputs]
    for name in names:
        if name not in inputs:
            raise RunError(
                f"input {name!r} is missing",
                where=f"graph {graph.name!r}",
                expected=", ".join(map(repr, names)),
                found=", ".join(map(repr, inputs)) or "none",
            )
    for name in inputs:
        if name not in names:
            raise RunError(
                f"there is no input {name!r}",
                where=f"graph {graph.name!r}",
                expected=", ".join(map(repr, names)) or "no input",
                hint=nearest(name, names),
            )


def check_sizes(sizes: Mapping[str, int], known: Iterable[str], where: str) -> None:
    """Name a size that is none of the model's free ones."""
    names = sorted(known)
    for name in sizes:
        if name not in names:
            raise RunError(
                f"there is no free size {name!r}",
                where=where,
                expected=", ".join(map(repr, names)) or "none: all its sizes are fixed",
                hint=nearest(name, names),
            )


def bind_inputs(
    values: Iterable[Value], arrays: Iterable[Any], bindings: dict[str, int]
) -> list[Any]:
    """The arrays, checked against the declared types; adds the sizes they fix to `bindings`.

    The second pass checks sizes that a later input binds.
    """
    pairs = list(zip(values, arrays, strict=True))
    for value, array in pairs:
        bind_input(value, array, bindings)
    return [bind_input(value, array, bindings) for value, array in pairs]


def input_sizes(graph: Graph, feeds: Mapping[str, Any]) -> dict[str, int]:
    """The symbolic sizes that these inputs fix, by name."""
    bindings: dict[str, int] = {}
    bind_inputs(graph.inputs, [feeds[value.name] for value in graph.inputs], bindings)
    return bindings


def bind_input(value: Value, array: Any, bindings: dict[str, int]) -> Any:
    """Check an array against a declared type and learn the sizes it fixes."""
    type_ = value.type
    if not isinstance(type_, TensorType):
        return array
    array = as_array(array)
    where = f"input {value.name!r}"
    found = TensorType(dtype(array.dtype), array.shape)
    if found.dtype != type_.dtype:
        raise RunError(
            "has the wrong element type",
            where=where,
            expected=type_,
            found=found,
            hint=f"Convert it with .astype({type_.dtype.numpy.name!r}).",
        )
    if found.rank != type_.rank:
        raise RunError("has the wrong rank", where=where, expected=type_, found=found)
    for axis, (size, actual) in enumerate(zip(type_.shape, array.shape, strict=True)):
        if not solve(size, actual, bindings):
            known = f" where {_bound(size, bindings)}" if _bound(size, bindings) else ""
            raise RunError(
                f"has the wrong size on axis {axis}",
                where=where,
                expected=f"{type_}{known}",
                found=found,
            )
        for symbol in size.symbols if isinstance(size, Dim) else ():
            if symbol.bound is not None and bindings.get(symbol.name, 0) > symbol.bound:
                raise RunError(
                    f"size {symbol.name!r} is above its bound",
                    where=where,
                    expected=f"at most {symbol.bound}",
                    found=bindings[symbol.name],
                )
    return array


def _bound(size: Any, bindings: Mapping[str, int]) -> str:
    names = sorted(s.name for s in size.symbols) if isinstance(size, Dim) else []
    return ", ".join(f"{n} = {bindings[n]}" for n in names if n in bindings)


def solve(size: Size, value: int, bindings: dict[str, int]) -> bool:
    """Bind the one unbound symbol of a linear size so that it equals `value`, if it can."""
    if not isinstance(size, Dim):
        return size == value
    unbound = {s.name for s in size.symbols if s.name not in bindings}
    if not unbound:
        return evaluate(size, bindings) == value
    if len(unbound) > 1:
        return True  # another dimension will bind them
    (name,) = unbound
    at0, at1, at2 = (evaluate(size, {**bindings, name: k}) for k in (0, 1, 2))
    slope = at1 - at0
    if slope == 0 or at2 - at1 != slope or (value - at0) % slope or (value - at0) // slope < 0:
        return False
    bindings[name] = (value - at0) // slope
    return True
