"""Tokens of text and text of tokens, with the `tokenizers` library underneath.

tokenizer = read_tokenizer(source)          # GGUF metadata, or the path of a tokenizer.json
tokens = tokenizer.encode("Hello")          # no begin token; "<|im_end|>" is plain text
tokenizer.decode(tokens)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from bitwright.errors import RunError
from bitwright.llm.text.decoding import StreamDecoder
from bitwright.llm.text.vocabulary import Vocabulary

GUARD = "\ue000\u2060\ue000"
"""Stands inside the name of a special token that is meant as plain text."""


@dataclass(frozen=True)
class SpecialTokens:
    """Tokens with a role."""

    begin: int | None
    """Stands in front of every prompt if `adds_begin`."""
    end: frozenset[int]
    """Tokens that end a generation."""
    adds_begin: bool
    separator: int | None = None
    """What an encoder expects after the text."""
    final: int | None = None
    """What stands behind a text that is embedded, if the model expects it."""


class Tokenizer:
    """`make(plain)` builds the library's tokenizer; with `plain` no name of a token is special."""

    def __init__(
        self,
        make: Callable[[bool], Any],
        vocabulary: Vocabulary,
        special: SpecialTokens,
        *,
        strips_space: bool,
    ) -> None:
        self._make, self.vocabulary, self.special = make, vocabulary, special
        self._strips_space = strips_space

    @cached_property
    def _plain(self) -> Any:
        return self._make(True)

    @cached_property
    def _parsing(self) -> Any:
        return self._make(False)

    @cached_property
    def _names(self) -> dict[str, int]:
        """Control tokens by what they are written as."""
        text_of = self.vocabulary.text
        return {text: token for token in self.vocabulary.control if (text := text_of(token))}

    @cached_property
    def _name(self) -> re.Pattern[str]:
        """Finds the name of a control token; longer names first."""
        names = sorted(self._names, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, names)) if names else r"(?!)")

    def encode(self, text: str | bytes, *, special: bool = False) -> list[int]:
        """Tokens of a text, without a begin token.

        With `special`, names of control tokens (`<|im_end|>`) become these tokens. Bytes must be
        UTF-8.
        """
        text = _checked(text)
        if special and GUARD in text:
            return self._encode_guarded(text)
        tokenizer = self._parsing if special else self._plain
        try:
            ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        except Exception as error:  # the library raises bare exceptions
            raise RunError(f"the tokenizer has no tokens for the text: {error}") from None
        return ids

    def guard(self, text: str) -> str:
        """The text with a guard in every name of a control token, which makes it plain text.

        `encode(..., special=True)` removes the guards. So what a user writes cannot end a turn.
        """
        text = text.replace(GUARD, "")
        return self._name.sub(lambda found: found[0][:1] + GUARD + found[0][1:], text)

    def _encode_guarded(self, text: str) -> list[int]:
        tokens: list[int] = []
        at = 0
        for found in self._name.finditer(text):
            tokens += self.encode(text[at : found.start()].replace(GUARD, ""))
            tokens.append(self._names[found[0]])
            at = found.end()
        return tokens + self.encode(text[at:].replace(GUARD, ""))

    def prompt(self, text: str | bytes) -> list[int]:
        """Tokens of a prompt: a begin token where the model expects one, then the text."""
        return [*self.begin_tokens, *self.encode(text)]

    @property
    def begin_tokens(self) -> list[int]:
        special = self.special
        return [special.begin] if special.adds_begin and special.begin is not None else []

    def decode(self, tokens: Iterable[int], *, special: bool = False) -> str:
        """The text of tokens; control tokens are left out unless `special`.

        Bytes that are no UTF-8 become U+FFFD.
        """
        decoder = StreamDecoder(
            self.vocabulary, shows_control=special, strips_space=self._strips_space
        )
        text = "".join([decoder.add(int(token)) for token in tokens])
        return text + decoder.finish()

    def decode_bytes(self, tokens: Iterable[int]) -> bytes:
        """The bytes of tokens, which need not be UTF-8; control tokens are left out."""
        control = self.vocabulary.control
        return b"".join(self.vocabulary.bytes_of(int(t)) for t in tokens if t not in control)

    def stream(self) -> StreamDecoder:
        """Decodes tokens that continue a text."""
        return StreamDecoder(self.vocabulary)

    def check(self, tokens: Sequence[int]) -> None:
        """Raise if a token is not in the vocabulary."""
        size = self.vocabulary.size
        for token in tokens:
            if not 0 <= token < size:
                raise RunError(
                    f"token {token} is not in the vocabulary", expected=f"0 to {size - 1}"
                )


def _checked(text: str | bytes) -> str:
    if isinstance(text, str):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RunError(
                "the text has half of a surrogate pair, which is no character",
                where=f"character {error.start}",
                hint='Repair it with text.encode("utf-16", "surrogatepass").decode("utf-16").',
            ) from None
        return text
    if isinstance(text, bytes | bytearray | memoryview):
        try:
            return bytes(text).decode()
        except UnicodeDecodeError as error:
            raise RunError(
                "the text is not UTF-8",
                where=f"byte {error.start}",
                hint='Decode it yourself, for example with data.decode("utf-8", "replace").',
            ) from None
    raise RunError("a text is a str or UTF-8 bytes", found=type(text).__name__)
