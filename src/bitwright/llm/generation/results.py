"""Results of generations, whole and as a stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from bitwright.llm.generation.job import Counts, Job, Piece, TokenLogprob
from bitwright.llm.generation.scheduler import Scheduler


@dataclass(frozen=True)
class Generation:
    """A finished generation."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    """"stop": an end token, a stop string or the end of a constraint; "length": a limit."""
    counts: Counts
    logprobs: tuple[TokenLogprob, ...] | None = None

    def __str__(self) -> str:
        return self.text


class Stream(Iterator[Piece]):
    """Pieces of a generation as they come; `counts` says what it took so far.

    Leaving it early (`close`, or the end of a `with`) cancels the generation.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._pieces: deque[Piece] = deque()
        self.job: Job

    def take(self, piece: Piece) -> None:
        """A piece arrived."""
        self._pieces.append(piece)

    @property
    def counts(self) -> Counts:
        return self.job.counts

    def __next__(self) -> Piece:
        while True:
            while self._pieces:
                piece = self._pieces.popleft()
                if piece.error is not None:
                    raise piece.error
                if piece.text or piece.tokens or piece.finish_reason:
                    return piece
            if self.job.is_done:
                raise StopIteration
            self._scheduler.step()

    def close(self) -> None:
        """Cancel what is not finished."""
        if not self.job.is_done:
            self.job.is_cancelled = True
            self._scheduler.step()
        self._pieces.clear()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def whole(self) -> Generation:
        """Run to the end."""
        pieces = list(self)
        asked = self.job.options.logprobs is not None
        return Generation(
            "".join(piece.text for piece in pieces),
            tuple(token for piece in pieces for token in piece.tokens),
            next((p.finish_reason for p in reversed(pieces) if p.finish_reason), "stop"),
            self.counts,
            tuple(one for piece in pieces for one in piece.logprobs) if asked else None,
        )
