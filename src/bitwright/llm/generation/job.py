"""One generation: what it runs next, and what it makes of the logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bitwright.errors import BitwrightError
from bitwright.llm.engine.decoder import Array
from bitwright.llm.engine.engine import Sequence, Work
from bitwright.llm.generation.constraint import Constraint
from bitwright.llm.generation.options import Options
from bitwright.llm.generation.sampling import Sampler, log_probabilities
from bitwright.llm.generation.speculation import Drafter
from bitwright.llm.generation.stops import StopFinder
from bitwright.llm.text.tokenizer import Tokenizer

DRAFTS = 8
"""Tokens that are guessed at once."""


@dataclass(frozen=True)
class TokenLogprob:
    """The logarithm of a token's probability before temperature and limits."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The most probable tokens, the best first."""


@dataclass(frozen=True)
class Piece:
    """What one step added."""

    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    """None while it goes on; "stop", "length", "cancelled" or "error" with the last piece."""
    error: BitwrightError | None = None


@dataclass
class Counts:
    """Tokens of a generation, and where they came from."""

    prompt: int = 0
    reused: int = 0
    generated: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(eq=False)
class Job:
    """A prompt, its options, and the state of the text so far.

    `emit` gets each piece as soon as it is certain; it must not raise.
    """

    prompt: list[int]
    options: Options
    tokenizer: Tokenizer
    emit: Callable[[Piece], None]
    constraint: Constraint | None = None
    drafter: Drafter | None = None
    sequence: Sequence = field(default_factory=Sequence)
    counts: Counts = field(default_factory=Counts)
    is_cancelled: bool = False
    is_done: bool = False

    def __post_init__(self) -> None:
        size = self.tokenizer.vocabulary.size
        self._sampler = Sampler(self.options, self.prompt, size)
        self._stops = StopFinder(self.options.stop)
        self._decoder = self.tokenizer.stream()
        self._pending = list(self.prompt)
        """Tokens that are not in the cache yet."""
        self._drafts: list[int] = []
        self._history = list(self.prompt)
        self.counts.prompt = len(self.prompt)

    def start(self, reused: int) -> None:
        """The first tokens of the prompt are in the cache already."""
        self.counts.reused = reused
        self._pending = self.prompt[reused:]

    @property
    def is_decoding(self) -> bool:
        """Whether the prompt is in the cache, except for its last tokens."""
        return len(self._pending) == 1

    def work(self, rows: int, context: int) -> Work:
        """What to run next, at most `rows` rows."""
        if len(self._pending) > 1:
            part = self._pending[:rows]
            return Work(self.sequence, part, int(len(part) == len(self._pending)))
        room = min(DRAFTS, rows - 1, context - len(self._history), self._rest() - 1)
        self._drafts = []
        if self.drafter is not None and room > 0:
            self._drafts = self.drafter.propose(self._history, room)[:room]
        tokens = self._pending + self._drafts
        return Work(self.sequence, tokens, len(tokens))

    def _rest(self) -> int:
        """Tokens that may still be generated."""
        limit = self.options.max_tokens
        return 1 << 31 if limit is None else limit - self.counts.generated

    def advance(self, work: Work, logits: Array, context: int) -> None:
        """Use the logits of what ran."""
        if not work.wanted:
            self._pending = self._pending[len(work.tokens) :]
            return
        drafts, self._drafts = self._drafts, []
        self.counts.drafted += len(drafts)
        logits = logits[:, : self.tokenizer.vocabulary.size]
        text, tokens, logprobs, reason = "", [], [], None
        kept = len(self._history)
        for number in range(work.wanted):
            token = self._choose(logits[number])
            if self.options.logprobs is not None and not self._is_end(token):
                logprobs.append(self._logprob(logits[number], token))
            more, reason = self._take(token, context)
            text += more
            if not self._is_end(token):
                tokens.append(token)
            is_guessed = number < len(drafts) and drafts[number] == token
            if reason is not None or not is_guessed:
                break
            kept += 1
            self.counts.accepted += 1
        del self.sequence.tokens[kept:]
        self._pending = self._history[-1:]
        if reason is not None:
            self.is_done = True
        self.emit(Piece(text, tuple(tokens), tuple(logprobs), reason))

    def _is_end(self, token: int) -> bool:
        return token in self.tokenizer.special.end and not self.options.ignore_end

    def _choose(self, logits: Array) -> int:
        mask = None if self.constraint is None else self.constraint.mask()
        return self._sampler.choose(logits, len(self._history), mask)

    def _take(self, token: int, context: int) -> tuple[str, str | None]:
        """Append a token: the text that is certain now, and the reason to end."""
        self._sampler.accept(token)
        self._history.append(token)
        if self._is_end(token):
            return self._last_text(""), "stop"
        self.counts.generated += 1
        if self.constraint is not None:
            self.constraint.accept(token)
        text, is_stopped = self._stops.add(self._decoder.add(token))
        if is_stopped:
            return text, "stop"
        if self.constraint is not None and self.constraint.is_complete:
            return self._last_text(text), "stop"
        if self._rest() <= 0 or len(self._history) > context:
            return self._last_text(text), "length"
        return text, None

    def _last_text(self, text: str) -> str:
        """The text with what decoder and stop strings held back."""
        more, is_stopped = self._stops.add(self._decoder.finish())
        return text + more + ("" if is_stopped else self._stops.finish())

    def _logprob(self, logits: Array, token: int) -> TokenLogprob:
        values = log_probabilities(logits)
        count = min(self.options.logprobs or 0, len(values))
        top: list[Any] = []
        if count:
            best = np.argpartition(-values, count - 1)[:count]
            best = best[np.lexsort((best, -values[best]))]
            top = [(int(one), float(values[one])) for one in best]
        return TokenLogprob(token, float(values[token]), tuple(top))

    def fail(self, error: BitwrightError) -> None:
        """End with an error."""
        self.is_done = True
        self.emit(Piece("", finish_reason="error", error=error))

    def stop(self, reason: str = "cancelled") -> None:
        """End early."""
        self.is_done = True
        self.emit(Piece(self._last_text(""), finish_reason=reason))
