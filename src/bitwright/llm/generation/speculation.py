"""Guesses of the next tokens, which one run of the model checks together.

A guess is kept only where the model chooses the same token, so results do not change.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from bitwright.errors import RunError
from bitwright.llm.engine.engine import Engine, Sequence, common_prefix


class Drafter(Protocol):
    """Guesses tokens."""

    def propose(self, tokens: list[int], count: int) -> list[int]:
        """At most `count` tokens that may follow."""
        ...

    def close(self) -> None: ...


class PromptLookup:
    """Guesses that what followed the last few tokens earlier follows again."""

    def __init__(self, longest: int = 4) -> None:
        self._longest = longest
        self._places: dict[tuple[int, ...], int] = {}
        self._length = 0

    def propose(self, tokens: list[int], count: int) -> list[int]:
        last = len(tokens)
        if last < self._length:
            self._places, self._length = {}, 0
        for end in range(max(self._length, 2), last):  # groups that end before the last token
            for size in range(2, min(self._longest, end) + 1):
                self._places[tuple(tokens[end - size : end])] = end
        self._length = max(self._length, last)
        for size in range(min(self._longest, last), 1, -1):
            found = self._places.get(tuple(tokens[last - size :]))
            if found is not None:
                period = last - found  # what follows may reach into the guess itself
                return [tokens[found + number % period] for number in range(count)]
        return []

    def close(self) -> None:
        pass


class DraftModel:
    """Guesses the tokens that a smaller model of the same vocabulary finds most probable."""

    def __init__(self, engine: Engine, vocabulary: int) -> None:
        if engine.decoder.vocabulary != vocabulary:
            raise RunError(
                "the draft model has another vocabulary",
                expected=f"{vocabulary} tokens",
                found=engine.decoder.vocabulary,
            )
        self._engine, self._sequence = engine, Sequence()

    def propose(self, tokens: list[int], count: int) -> list[int]:
        engine, sequence = self._engine, self._sequence
        count = min(count, engine.context - len(tokens))
        if count <= 0:
            return []
        same = min(common_prefix(sequence.tokens, tokens), len(tokens) - 1)
        engine.truncate(sequence, same)
        logits = engine.extend(sequence, tokens[same:])
        found = [int(np.argmax(logits[-1]))]
        while len(found) < count:
            found.append(int(np.argmax(engine.extend(sequence, found[-1:])[-1])))
        return found

    def close(self) -> None:
        self._engine.release(self._sequence)
