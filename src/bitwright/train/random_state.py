"""The global random generators as a data source sees them: seeded for each epoch, and its own.

Datasets draw crops and flips from `random`, `numpy.random` or torch. Between two batches other code
draws too: an evaluation, a callback, the user's program. The draws of an epoch must depend on
the seed and the epoch only, or a resumed run would see other data.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


class RandomState:
    """The states of the global generators in one epoch of a data source."""

    def __init__(self, seed: int) -> None:
        self.seed, self._states = seed % 2**63, None

    _states: tuple[Any, ...] | None

    @contextmanager
    def active(self) -> Iterator[None]:
        """The generators are in this state inside the block, and as before behind it."""
        before = _read()
        if self._states is None:
            _seed(self.seed)
        else:
            _write(self._states)
        try:
            yield
        finally:
            self._states = _read()
            _write(before)


def isolated(make: Callable[[], Iterable[Any]], skip: int, seed: int) -> Iterator[Any]:
    """The items of an iterable after the first `skip`, drawn in a random state of their own."""
    state = RandomState(seed)
    with state.active():
        items = iter(make())
    taken = 0
    while True:
        with state.active():
            try:
                item = next(items)
            except StopIteration:
                return
        taken += 1
        if taken > skip:
            yield item


def _torch() -> Any:
    return sys.modules.get("torch")  # a data source that uses it has imported it


def _read() -> tuple[Any, ...]:
    torch = _torch()
    state = None if torch is None else torch.random.default_generator.get_state()
    return random.getstate(), np.random.get_state(), state


def _write(states: tuple[Any, ...]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    if states[2] is not None:
        _torch().random.default_generator.set_state(states[2])


def _seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number % 2**32)
    torch = _torch()
    if torch is not None:
        torch.random.default_generator.manual_seed(number)
