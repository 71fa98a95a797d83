"""A compiled decoder graph and its cache.

The graph takes `tokens`, `slot`, `position` (one of each per row) and `rows` (the rows whose logits
are wanted). Its states have the slot as axis 0 and the position as axis 2.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from bitwright.errors import BitwrightError
from bitwright.executable import Executable

Array = np.ndarray[Any, Any]
_ALIGNMENT = 64
_INPUTS = ("tokens", "slot", "position", "rows")


def _empty(shape: tuple[int, ...], element: np.dtype[Any]) -> Array:
    """Zeros whose pages take no memory until they are written."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * element.itemsize
    raw = np.zeros(nbytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + nbytes].view(element).reshape(shape)


class Decoder:
    """Runs rows of many sequences at once, and copies parts of the cache.

    `output` is what the graph computes for the wanted rows.
    """

    def __init__(self, executable: Executable, output: str = "logits") -> None:
        graph = executable.interface
        names = tuple(value.name for value in graph.inputs)
        if set(names) != set(_INPUTS) or not graph.states:
            raise BitwrightError(
                "the graph is no decoder",
                where=f"graph {graph.name!r}",
                expected=f"inputs {', '.join(_INPUTS)} and states",
                found=f"inputs {', '.join(names)} and {len(graph.states)} states",
            )
        shapes = {v.name: v.tensor.concrete({}) for v in graph.states}
        first = next(iter(shapes.values()))
        self.slots, self.context = first[0], first[2]
        self.executable, self._output = executable, output
        size = dict(graph.outputs)[output].tensor.shape[1]
        assert isinstance(size, int)
        self.vocabulary = size
        self._states = {v.name: _empty(shapes[v.name], v.tensor.dtype.numpy) for v in graph.states}
        self.executable.engine.states.update(self._states)

    def run(
        self,
        tokens: Sequence[int] | Array,
        slots: Sequence[int] | Array,
        positions: Sequence[int] | Array,
        rows: Sequence[int] | Array,
    ) -> Array:
        """The output of the wanted rows; the caller owns the array."""
        feeds = {
            "tokens": np.asarray(tokens, np.int32),
            "slot": np.asarray(slots, np.int32),
            "position": np.asarray(positions, np.int32),
            "rows": np.asarray(rows, np.int32),
        }
        found: Array = self.executable.run(feeds)[self._output]
        return found

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of a slot to another one."""
        for state in self._states.values():
            state[target, :, :length] = state[source, :, :length]

    def read(self, slot: int, length: int) -> dict[str, Array]:
        """The first `length` positions of a slot, as arrays of their own."""
        return {name: state[slot, :, :length].copy() for name, state in self._states.items()}

    def write(self, slot: int, arrays: dict[str, Array]) -> None:
        """Put what `read` returned into a slot."""
        for name, array in arrays.items():
            self._states[name][slot, :, : array.shape[1]] = array

    def layout(self) -> list[tuple[str, tuple[int, ...], str]]:
        """Name, shape of one position and element type of every state."""
        return [
            (name, (state.shape[1], *state.shape[3:]), state.dtype.name)
            for name, state in self._states.items()
        ]

    @property
    def cache_bytes(self) -> int:
        return sum(state.nbytes for state in self._states.values())

    def fingerprint(self, facts: Iterable[object] = ()) -> str:
        """Identifies the model that a saved cache belongs to."""
        text = repr((self.vocabulary, self.layout(), *facts))
        return hashlib.sha256(text.encode()).hexdigest()
