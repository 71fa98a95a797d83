"""Unique names, and the names that the model's source has for weights and layers.

The source location of a folded constant names the constant of the model that it was made from,
`made from fc.weight`. The location of a node ends in ` in path.of.module` if the file has modules.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from bitwright.ir.graph import Node, Value, constant_value

_MADE_FROM = "made from "
_IN = " in "
_CARRIES = frozenset({"transpose", "reshape", "dequantize", "cast", "expand", "identity"})
"""Ops whose result still counts as the weight that is their first operand."""


def take_name(hint: str, taken: set[str]) -> str:
    """`hint`, or `hint_1`, `hint_2`, … if it is taken; adds the name to `taken`."""
    name, count = hint, 0
    while name in taken:
        count += 1
        name = f"{hint}_{count}"
    taken.add(name)
    return name


def made_from(loc: str, sources: Iterable[Value]) -> str:
    """The location of a constant made from `sources`, with the largest one of rank 2 or more."""
    known = [(value, constant_value(value)) for value in sources]
    sizes = [(array.size, value) for value, array in known if array is not None and array.ndim > 1]
    if not sizes:
        return loc
    return _MADE_FROM + origin(max(sizes, key=lambda pair: pair[0])[1])


def origin(value: Value) -> str:
    """The name of the model's constant that this one was made from, or its own name."""
    loc = value.node.loc
    return loc.removeprefix(_MADE_FROM) if loc.startswith(_MADE_FROM) else value.name


def in_module(loc: str, module: str) -> str:
    """A location within a module of the model's source."""
    return f"{loc}{_IN}{module}" if module else loc


def module_of(loc: str) -> str:
    """The module of a location, or "".

    Exporters without modules write the path into the node's name, `/layers.0/fc/MatMul`.
    """
    if _IN in loc:
        return loc.rpartition(_IN)[2]
    path = loc.partition(" ")[2]
    return ".".join(path.strip("/").split("/")[:-1]) if path.startswith("/") else ""


def weight_names(node: Node) -> tuple[str, ...]:
    """The model's names of the constants and parameters that a node reads."""
    found: dict[str, None] = {}
    for value in node.operands:
        while value.node.op in _CARRIES and value.node.inputs[0] is not None:
            if value.node.loc.startswith(_MADE_FROM):
                found[origin(value)] = None
            value = value.node.inputs[0]
        if value.node.op in ("constant", "parameter") and value.rank:
            found[origin(value)] = None
    return tuple(found)


def names_of(node: Node) -> tuple[str, ...]:
    """The names by which a pattern can match a node: its results, its weights and its module."""
    module = module_of(node.loc)
    modules = (module, f"{module}.weight") if module else ()
    return (*node.names, *weight_names(node), *modules)


def near_misses(pattern: str, names: Iterable[str]) -> str:
    """A hint with names, or endings of names, that are close to a pattern without a match."""
    core = pattern.removeprefix("re:").strip("*.^$")
    endings: dict[str, None] = {}
    for name in names:
        parts = name.replace("/", ".").split(".")
        for last in (len(parts), len(parts) - 1):  # `fc.weight` and `fc`
            endings.update({".".join(parts[i:last]): None for i in range(last)})
        endings[name] = None
    close = difflib.get_close_matches(core, list(endings), 3, 0.6)
    return f"Did you mean {' or '.join(map(repr, close))}?" if close else ""
