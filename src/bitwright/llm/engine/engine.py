"""One decoder for many sequences: who has which slot, and batches of their rows.

A sequence is a list of tokens whose keys and values are in the cache. It has a slot only while
it runs: if there are more sequences than slots, the one that ran longest ago moves out to memory
of its own and back when it runs again. A released slot keeps its tokens, and a new sequence with
the same beginning starts from them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

import numpy as np

from bitwright.errors import RunError
from bitwright.llm.engine.decoder import Array, Decoder

CHUNK = 512
"""Rows that one run takes; longer prompts take several."""


@dataclass(eq=False)
class Sequence:
    """Tokens in the cache: in a slot, or moved out."""

    tokens: list[int] = field(default_factory=list)
    slot: int | None = None
    moved: dict[str, Array] | None = None


@dataclass
class Work:
    """Tokens to append to a sequence, and the number of last rows whose logits are wanted."""

    sequence: Sequence
    tokens: Tokens[int]
    wanted: int = 1


class _Slot:
    """One slot. A sequence that nobody refers to any more gives its slot back."""

    def __init__(self) -> None:
        self._owner: weakref.ref[Sequence] | None = None
        self.tokens: list[int] = []
        """What the slot holds; if it has an owner, those of the owner count."""
        self.used = 0

    @property
    def owner(self) -> Sequence | None:
        return None if self._owner is None else self._owner()

    @owner.setter
    def owner(self, sequence: Sequence | None) -> None:
        self._owner = None if sequence is None else weakref.ref(sequence)

    @property
    def held(self) -> list[int]:
        owner = self.owner
        return self.tokens if owner is None else owner.tokens


def common_prefix(a: list[int], b: list[int]) -> int:
    """The number of equal first elements."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class Engine:
    """Runs sequences. Every method takes the lock; a caller may hold it for several calls."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.lock = threading.RLock()
        self._slots = [_Slot() for _ in range(decoder.slots)]
        self._clock = 0

    @property
    def context(self) -> int:
        return self.decoder.context

    def check_room(self, length: int, count: int) -> None:
        """Raise if `count` tokens behind `length` do not fit the context."""
        if length + count > self.context:
            raise RunError(
                "the tokens do not fit the context",
                expected=f"at most {self.context} positions",
                found=f"{length} in the cache and {count} more",
                hint="Load the model with a larger context, or shorten the prompt.",
            )

    def run(self, work: Tokens[Work]) -> list[Array]:
        """Append tokens to sequences, all in one run; logits of the last rows of each.

        The sequences must differ and fit the slots together, and their rows one run.
        """
        with self.lock:
            busy = {id(one.sequence) for one in work}
            for one in work:
                self.check_room(len(one.sequence.tokens), len(one.tokens))
                self._place(one.sequence, busy)
            if len(work) == 1 and len(work[0].tokens) == 1 and work[0].wanted == 1:
                sequence, token = work[0].sequence, work[0].tokens[0]
                slot, position = sequence.slot, len(sequence.tokens)
                logits = self.decoder.run([token], [slot or 0], [position], [0])
                sequence.tokens.append(token)
                return [logits]
            return self._run_batch(work)

    def _run_batch(self, work: Tokens[Work]) -> list[Array]:
        counts = [len(one.tokens) for one in work]
        tokens = np.concatenate([np.asarray(one.tokens, np.int32) for one in work])
        slots = np.repeat(np.array([one.sequence.slot for one in work], np.int32), counts)
        starts = [len(one.sequence.tokens) for one in work]
        positions = np.concatenate(
            [np.arange(s, s + n, dtype=np.int32) for s, n in zip(starts, counts, strict=True)]
        )
        ends = np.cumsum(counts)
        rows = np.concatenate(
            [
                np.arange(end - one.wanted, end, dtype=np.int32)
                for end, one in zip(ends, work, strict=True)
            ]
        )
        logits = self.decoder.run(tokens, slots, positions, rows)
        for one in work:
            one.sequence.tokens += map(int, one.tokens)
        parts = np.cumsum([one.wanted for one in work])[:-1]
        return list(np.split(logits, parts))

    def extend(self, sequence: Sequence, tokens: Tokens[int], all_logits: bool = False) -> Array:
        """Append any number of tokens, in chunks: logits of the last one, or of all."""
        self.check_room(len(sequence.tokens), len(tokens))
        parts: list[Array] = []
        with self.lock:
            before = len(sequence.tokens)
            try:
                for start in range(0, len(tokens), CHUNK):
                    part = tokens[start : start + CHUNK]
                    is_last = start + CHUNK >= len(tokens)
                    wanted = len(part) if all_logits else int(is_last)
                    parts += self.run([Work(sequence, part, wanted)])
            except BaseException:  # a part that ran does not stay
                self.truncate(sequence, before)
                raise
        return parts[-1] if not all_logits or len(parts) == 1 else np.concatenate(parts)

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Forget all tokens from position `length` on."""
        with self.lock:
            if not 0 <= length <= len(sequence.tokens):
                raise RunError(
                    "a sequence is truncated to a length that it does not have",
                    expected=f"0 to {len(sequence.tokens)}",
                    found=length,
                )
            del sequence.tokens[length:]
            if sequence.moved is not None:
                sequence.moved = {n: a[:, :length].copy() for n, a in sequence.moved.items()}

    def clone(self, sequence: Sequence) -> Sequence:
        """A sequence with the same tokens and a cache of its own."""
        with self.lock:
            return Sequence(list(sequence.tokens), None, self.read(sequence))

    def read(self, sequence: Sequence) -> dict[str, Array]:
        """A copy of the sequence's part of the cache."""
        with self.lock:
            if sequence.slot is not None:
                return self.decoder.read(sequence.slot, len(sequence.tokens))
            if sequence.moved is not None:
                return {name: array.copy() for name, array in sequence.moved.items()}
            return self.decoder.read(0, 0)

    def reuse(self, sequence: Sequence, prompt: list[int]) -> int:
        """Start an empty sequence from the longest beginning of `prompt` that a slot holds.

        At least one token of the prompt stays to be run. Returns the number of tokens reused.
        """
        with self.lock:
            lengths = [min(common_prefix(s.held, prompt), len(prompt) - 1) for s in self._slots]
            best = max(range(len(lengths)), key=lambda i: (lengths[i], self._slots[i].used))
            length = lengths[best]
            if length <= 0:
                return 0
            source = self._slots[best]
            # A slot that nobody owns is taken as it is, unless that would drop a long rest while
            # another slot is free.
            free = [s for s in self._slots if s.owner is None]
            if source.owner is None and (2 * length >= len(source.tokens) or free == [source]):
                self._give(best, sequence)
                sequence.tokens = prompt[:length]
                return length
            target = self._choose({id(source.owner)} if source.owner else set(), but=best)
            if target is None:
                if source.owner is not None:
                    return 0  # one slot, and its owner is about to leave it
                target = best
            if target != best:
                self._vacate(target)
                self.decoder.copy(best, target, length)
            self._give(target, sequence)
            sequence.tokens = prompt[:length]
            return length

    def release(self, sequence: Sequence, keeps: bool = True) -> None:
        """The sequence ends; its slot keeps the tokens for others unless `keeps` is false."""
        with self.lock:
            if sequence.slot is not None:
                slot = self._slots[sequence.slot]
                slot.owner = None
                slot.tokens = list(sequence.tokens) if keeps else []
            sequence.slot, sequence.moved, sequence.tokens = None, None, []

    def forget(self) -> None:
        """Drop what released slots hold."""
        with self.lock:
            for slot in self._slots:
                slot.tokens = []

    def _place(self, sequence: Sequence, busy: set[int]) -> None:
        """Give the sequence a slot; those of `busy` sequences stay."""
        self._clock += 1
        if sequence.slot is None:
            number = self._choose(busy)
            if number is None:
                raise RunError(
                    "a run has more sequences than the cache has slots",
                    expected=f"at most {len(self._slots)}",
                )
            self._vacate(number)
            self._give(number, sequence)
            if sequence.moved is not None:
                self.decoder.write(number, sequence.moved)
                sequence.moved = None
        self._slots[sequence.slot or 0].used = self._clock

    def _choose(self, busy: set[int], but: int | None = None) -> int | None:
        """The slot to take: an empty one, else a released one, else that of an idle sequence."""
        found = [
            (slot.owner is not None, bool(slot.held), slot.used, number)
            for number, slot in enumerate(self._slots)
            if id(slot.owner) not in busy and number != but
        ]
        return min(found)[3] if found else None

    def _vacate(self, number: int) -> None:
        """Move the owner of a slot out to memory of its own."""
        slot = self._slots[number]
        owner = slot.owner
        if owner is not None:
            owner.moved = self.decoder.read(number, len(owner.tokens))
            owner.slot = None
        slot.owner, slot.tokens = None, []

    def _give(self, number: int, sequence: Sequence) -> None:
        self._clock += 1
        slot = self._slots[number]
        slot.owner, slot.tokens, slot.used = sequence, [], self._clock
        sequence.slot = number
