"""What a generation is asked for, checked once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bitwright.errors import RunError

MAX_STOPS, MAX_STOP_LENGTH, MAX_TOP_LOGPROBS = 16, 1000, 20


@dataclass(frozen=True)
class Options:
    """Options of one generation. The defaults are greedy: the most probable token each time."""

    max_tokens: int | None = 256
    """None: until the model ends or the context is full."""
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """Only the k most probable tokens; 0 is all."""
    top_p: float = 1.0
    """Only the most probable tokens whose probabilities together reach p."""
    min_p: float = 0.0
    """Only tokens with at least this share of the highest probability."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens that occurred, and multiplies negative ones."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    """Subtracted from logits of generated tokens: once, and per occurrence."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    """Each random number depends on the seed and the position only."""
    stop: Sequence[str] = ()
    """Texts that end the generation; they are not part of the result."""
    logprobs: int | None = None
    """Log-probabilities of each token and of this many alternatives; None for none."""
    json_schema: Mapping[str, Any] | bool | None = None
    """The text is JSON that fits the schema; True for any JSON object."""
    regex: str | None = None
    """The text matches this regular expression."""
    ignore_end: bool = False
    """Go on behind an end token."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        number = _number
        if self.max_tokens is not None:
            number("max_tokens", self.max_tokens, 1, 1 << 31, whole=True)
        number("temperature", self.temperature, 0, 100)
        number("top_k", self.top_k, 0, 1 << 31, whole=True)
        number("top_p", self.top_p, 0, 1)
        number("min_p", self.min_p, 0, 1)
        number("repetition_penalty", self.repetition_penalty, 0.01, 100)
        number("presence_penalty", self.presence_penalty, -100, 100)
        number("frequency_penalty", self.frequency_penalty, -100, 100)
        number("seed", self.seed, -(1 << 63), (1 << 64) - 1, whole=True)
        if self.logprobs is not None:
            number("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS, whole=True)
        self._check_stops()
        self._check_bias()
        if self.json_schema not in (None, False) and self.regex is not None:
            raise RunError("give json_schema or regex, not both", where="regex")
        if not (self.json_schema is None or isinstance(self.json_schema, Mapping | bool)):
            raise RunError("the schema is an object", where="json_schema")

    def _check_stops(self) -> None:
        stops = self.stop
        if not isinstance(stops, Sequence) or not all(isinstance(s, str) and s for s in stops):
            raise RunError("stop strings are texts that are not empty", where="stop")
        if len(stops) > MAX_STOPS or any(len(s) > MAX_STOP_LENGTH for s in stops):
            raise RunError(
                "there are too many stop strings, or too long ones",
                where="stop",
                expected=f"at most {MAX_STOPS} of at most {MAX_STOP_LENGTH} characters",
            )

    def _check_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise RunError("the bias is an object of tokens and numbers", where="logit_bias")
        for token, bias in self.logit_bias.items():
            _number("logit_bias", token, 0, 1 << 31, whole=True)
            _number("logit_bias", bias, -1000, 1000)

    @property
    def is_constrained(self) -> bool:
        return self.regex is not None or self.json_schema not in (None, False)


def _number(name: str, value: Any, low: float, high: float, whole: bool = False) -> None:
    kinds = int if whole else (int, float)
    is_right = isinstance(value, kinds) and not isinstance(value, bool)
    if not is_right or not low <= value <= high:  # NaN is in no range
        kind = "an integer" if whole else "a number"
        raise RunError(
            f"{name} is out of range",
            where=name,
            expected=f"{kind} from {low:g} to {high:g}",
            found=repr(value)[:80],
        )
