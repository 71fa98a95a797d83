"""Names that nobody has yet, and where constants and layers have their names from.

The source location of a constant that folding made says which constant of the model it was made
from, `made from fc.weight`; that of a node ends in ` in path.of.module` where the file tells it.
"""

from __future__ import annotations

from collections.abc import Iterable

from bitwright.ir.graph import Value, constant_value

_MADE_FROM = "made from "
_IN = " in "


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
    """The module that a location names, "" where it names none."""
    return loc.rpartition(_IN)[2] if _IN in loc else ""
