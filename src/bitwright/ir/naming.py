"""Names that nobody has yet, and where constants and layers have their names from.

The source location of a constant that folding made says which constant of the model it was made
from, `made from fc.weight`; that of a node ends in ` in path.of.module` where the file tells it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from bitwright.ir.graph import Node, Value, constant_value

_MADE_FROM = "made from "
_IN = " in "
_CARRIES = frozenset({"transpose", "reshape", "dequantize", "cast", "expand", "identity"})
"""Ops whose result is still the weight that their first operand is."""


def take_name(hint: str, taken: set[str]) -> str:
    """`hint`, or `hint_1`, `hint_2`, … if it is taken; it is from now on."""
    name, count = hint, 0
    while name in taken:
        count += 1
        name = f"{hint}_{count}"
    taken.add(name)
    return name


def made_from(loc: str, sources: Iterable[Value]) -> str:
    """The location of a constant made of these: the largest that is no vector, else `loc`."""
    known = [(value, constant_value(value)) for value in sources]
    sizes = [(array.size, value) for value, array in known if array is not None and array.ndim > 1]
    if not sizes:
        return loc
    return _MADE_FROM + origin(max(sizes, key=lambda pair: pair[0])[1])


def origin(value: Value) -> str:
    """The name of the constant of the model that a constant was made from, or its own."""
    loc = value.node.loc
    return loc.removeprefix(_MADE_FROM) if loc.startswith(_MADE_FROM) else value.name


def in_module(loc: str, module: str) -> str:
    """A location within a module of the model's source."""
    return f"{loc}{_IN}{module}" if module else loc


def module_of(loc: str) -> str:
    """The module that a location names, "" where it names none.

    Exporters that know of no modules write their path as the name of a node, `/layers.0/fc/MatMul`.
    """
    if _IN in loc:
        return loc.rpartition(_IN)[2]
    path = loc.partition(" ")[2]
    return ".".join(path.strip("/").split("/")[:-1]) if path.startswith("/") else ""


def weight_names(node: Node) -> tuple[str, ...]:
    """The names that the model has for the constants and parameters that a node reads."""
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
    """All names that a pattern may mean a node by: of its results, its weights and its module."""
    module = module_of(node.loc)
    modules = (module, f"{module}.weight") if module else ()
    return (*node.names, *weight_names(node), *modules)


def near_misses(pattern: str, names: Iterable[str]) -> str:
    """A hint with names, or last parts of names, that look like a pattern that matches none."""
    core = pattern.removeprefix("re:").strip("*.^$")
    endings: dict[str, None] = {}
    for name in names:
        parts = name.replace("/", ".").split(".")
        for last in (len(parts), len(parts) - 1):  # `fc.weight` and `fc`
            endings.update({".".join(parts[i:last]): None for i in range(last)})
        endings[name] = None
    close = difflib.get_close_matches(core, list(endings), 3, 0.6)
    return f"Did you mean {' or '.join(map(repr, close))}?" if close else ""
