"""Answers of OpenAI's interface, whole and in chunks."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bitwright.llm.generation.job import Counts, Piece, TokenLogprob
from bitwright.llm.text.vocabulary import Vocabulary

_REASONS = {"cancelled": "length"}


@dataclass
class Answer:
    """What is common to all parts of an answer."""

    model: str
    vocabulary: Vocabulary
    is_chat: bool
    has_logprobs: bool
    choices: int
    """Answers per prompt, which is counted once."""
    id: str = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))
    offsets: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        self.id = f"{prefix}-{secrets.token_hex(12)}"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def whole(self, choices: Sequence[Sequence[Piece]], counts: Sequence[Counts]) -> dict[str, Any]:
        """The answer of a request without a stream."""
        kind = "chat.completion" if self.is_chat else "text_completion"
        listed = [self._choice(index, pieces) for index, pieces in enumerate(choices)]
        return self._head(kind) | {"choices": listed, "usage": usage(counts, self.choices)}

    def _choice(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        text = "".join(piece.text for piece in pieces)
        logprobs = [one for piece in pieces for one in piece.logprobs]
        common = {
            "index": index,
            "finish_reason": _reason(pieces[-1].finish_reason),
            "logprobs": self._logprobs(index, logprobs),
        }
        if self.is_chat:
            message = {"role": "assistant", "content": text, "refusal": None}
            return common | {"message": message}
        return common | {"text": text}

    def first(self, index: int) -> dict[str, Any]:
        """The chunk that opens an answer of a chat."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        choice = {"index": index, "delta": delta, "finish_reason": None, "logprobs": None}
        return self._head("chat.completion.chunk") | {"choices": [choice]}

    def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        """One piece of a stream."""
        common = {
            "index": index,
            "finish_reason": _reason(piece.finish_reason),
            "logprobs": self._logprobs(index, piece.logprobs),
        }
        if self.is_chat:
            delta = {"content": piece.text} if piece.text else {}
            choice, kind = common | {"delta": delta}, "chat.completion.chunk"
        else:
            choice, kind = common | {"text": piece.text}, "text_completion"
        return self._head(kind) | {"choices": [choice]}

    def last(self, counts: Sequence[Counts]) -> dict[str, Any]:
        """The chunk with the counts of tokens."""
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        return self._head(kind) | {"choices": [], "usage": usage(counts, self.choices)}

    def _logprobs(self, index: int, listed: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self.has_logprobs:
            return None
        if self.is_chat:
            content = [
                self._token(one.token, one.logprob)
                | {"top_logprobs": [self._token(*top) for top in one.top]}
                for one in listed
            ]
            return {"content": content, "refusal": None}
        texts = [self._text(one.token) for one in listed]
        offsets = []
        for text in texts:
            offsets.append(self.offsets.get(index, 0))
            self.offsets[index] = offsets[-1] + len(text)
        return {
            "tokens": texts,
            "token_logprobs": [one.logprob for one in listed],
            "top_logprobs": [{self._text(t): value for t, value in one.top} for one in listed],
            "text_offset": offsets,
        }

    def _text(self, token: int) -> str:
        return self.vocabulary.bytes_of(token).decode("utf-8", "replace")

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        data = list(self.vocabulary.bytes_of(token))
        return {"token": self._text(token), "logprob": max(logprob, -9999.0), "bytes": data}


def _reason(reason: str | None) -> str | None:
    return None if reason is None else _REASONS.get(reason, reason)


def usage(counts: Sequence[Counts], choices: int = 1) -> dict[str, Any]:
    """Counts of tokens; `cached_tokens` were in the cache already."""
    prompt = sum(one.prompt for one in counts[::choices])
    generated = sum(one.generated for one in counts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(one.reused for one in counts[::choices])},
        "completion_tokens_details": {
            "accepted_prediction_tokens": sum(one.accepted for one in counts),
            "rejected_prediction_tokens": sum(one.drafted - one.accepted for one in counts),
        },
    }
