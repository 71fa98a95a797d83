"""The states of a program: arrays by name, which notice when one is replaced.

A decoder has a hundred states that stay the same arrays from run to run; `token` says so without
a look at each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def _changing(name: str) -> Callable[..., Any]:
    method = getattr(dict, name)

    def change(self: States, *args: Any, **kwargs: Any) -> Any:
        self.token = object()
        return method(self, *args, **kwargs)

    change.__name__ = name
    return change


class States(dict[str, Array]):
    """Arrays by name."""

    def __init__(self) -> None:
        super().__init__()
        self.token = object()
        """Another object after every change of the mapping."""

    __setitem__, __delitem__ = _changing("__setitem__"), _changing("__delitem__")
    clear, pop, popitem = _changing("clear"), _changing("pop"), _changing("popitem")
    setdefault, update, __ior__ = (
        _changing("setdefault"),
        _changing("update"),
        _changing("__ior__"),
    )


def token_of(states: dict[str, Array]) -> object:
    """What is equal in two runs only if their states are the same arrays."""
    return states.token if isinstance(states, States) else object()
