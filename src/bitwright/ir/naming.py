"""Names that nobody has yet."""

from __future__ import annotations


def take_name(hint: str, taken: set[str]) -> str:
    """`hint`, or `hint_1`, `hint_2`, … if it is taken; it is from now on."""
    name, count = hint, 0
    while name in taken:
        count += 1
        name = f"{hint}_{count}"
    taken.add(name)
    return name
