"""Text that fits a JSON schema or a regular expression: which tokens may come next.

The automaton over tokens is that of the package `llguidance` (extra `[llm]`).
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from bitwright.errors import RunError
from bitwright.llm.generation.options import Options
from bitwright.llm.text.library import need
from bitwright.llm.text.tokenizer import Tokenizer

Array = np.ndarray[Any, Any]
MAX_SCHEMA = 200_000
_SPECIAL = b"\xff"
_JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Spaces that a model cannot get lost in."""


class _Vocabulary:
    """The vocabulary as llguidance reads it; control tokens begin with a byte of no UTF-8."""

    def __init__(self, tokenizer: Tokenizer, end: int) -> None:
        control = tokenizer.vocabulary.control
        self.tokens = [
            _SPECIAL + data if token in control else data
            for token, data in enumerate(tokenizer.vocabulary.all_bytes())
        ]
        self.eos_token_id, self.bos_token_id = end, tokenizer.special.begin
        self.special_token_ids = sorted(control)
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        data = text.encode() if isinstance(text, str) else bytes(text)
        return self._tokenizer.encode(data.decode("utf-8", "ignore"))


class Constraints:
    """Makes constraints for one vocabulary; building its tables takes a moment, once."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int) -> None:
        self._library = need("llguidance")
        ends = sorted(tokenizer.special.end)
        if not ends:
            raise RunError("constrained text needs a model with an end token")
        self._vocabulary = vocabulary
        wrapper = self._library.TokenizerWrapper(_Vocabulary(tokenizer, ends[0]))
        size = tokenizer.vocabulary.size
        self._table = self._library.LLTokenizer(wrapper, n_vocab=size, eos_token=ends)

    def make(self, options: Options) -> Constraint:
        """The constraint that options ask for; an invalid schema or expression is an error."""
        matcher = self._library.LLMatcher
        if options.regex is not None:
            where, grammar = "regex", matcher.grammar_from_regex(options.regex)
        else:
            where = "json_schema"
            schema = {"type": "object"} if options.json_schema is True else options.json_schema
            try:
                text = json.dumps(schema)
                grammar = matcher.grammar_from_json_schema(text, defaults=_JSON)
            except (TypeError, ValueError, RecursionError) as error:
                raise RunError(f"the schema is not valid: {error}", where=where) from None
        if len(grammar) > MAX_SCHEMA:
            raise RunError(f"the {where} is too long", where=where)
        made = matcher(self._table, grammar, log_level=0)
        if made.is_error():
            reason = made.get_error().strip().split("\n")[0][:300]
            raise RunError(f"the {where} cannot be used: {reason}", where=where)
        return Constraint(made, self._vocabulary)


class Constraint:
    """The state of one text."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary

    def mask(self) -> Array:
        """Which tokens may come next."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        mask = np.unpackbits(bits, bitorder="little")[: self._vocabulary].astype(bool)
        if len(mask) < self._vocabulary:
            mask = np.concatenate([mask, np.zeros(self._vocabulary - len(mask), bool)])
        return mask

    def accept(self, token: int) -> None:
        """The token that was chosen."""
        if not self._matcher.consume_token(token):
            self._check()

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow."""
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().strip().split("\n")[0][:300]
            raise RunError(f"the constraint cannot go on: {reason}")
