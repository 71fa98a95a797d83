"""The bytes that each token stands for.

Byte-level vocabularies write every byte as a visible character (`Ġ` is a space), sentencepiece
ones write a space as `▁` and single bytes as `<0x0A>`, word-piece ones mark what continues a word.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from enum import Enum
from functools import cache

from bitwright.errors import RunError


class Spelling(Enum):
    """How a vocabulary writes the bytes of its tokens."""

    BYTES = "byte level"
    SPACES = "sentencepiece"
    WORDS = "word pieces"


@cache
def bytes_of_characters() -> dict[str, int]:
    """The byte of each character of a byte-level vocabulary.

    Printable bytes of Latin-1 are written as themselves, the others as characters from 256 on.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    return {chr(byte): byte for byte in visible} | {
        chr(256 + number): byte for number, byte in enumerate(hidden)
    }


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


def _byte_level(text: str) -> bytes:
    table = bytes_of_characters()
    try:
        return bytes(table[character] for character in text)
    except KeyError:  # an added token is written as it is
        return text.encode("utf-8", "replace")


def _sentencepiece(text: str) -> bytes:
    if found := _BYTE_TOKEN.match(text):
        return bytes([int(found[1], 16)])
    return text.replace("▁", " ").encode("utf-8", "replace")


def _word_piece(text: str) -> bytes:
    word = text[2:] if text.startswith("##") else f" {text}"
    return word.encode("utf-8", "replace")


_READ: dict[Spelling, Callable[[str], bytes]] = {
    Spelling.BYTES: _byte_level,
    Spelling.SPACES: _sentencepiece,
    Spelling.WORDS: _word_piece,
}


class Vocabulary:
    """Bytes by token, read when they are first asked for."""

    def __init__(
        self,
        size: int,
        text_of: Callable[[int], str | None],
        spelling: Spelling,
        control: Iterable[int],
        as_written: Iterable[int],
    ) -> None:
        self.size, self.spelling = size, spelling
        self.control = frozenset(control)
        """Tokens that steer the model and stand for no text."""
        self._as_written = frozenset(as_written) | self.control
        self._text_of, self._read = text_of, _READ[spelling]
        self._known: dict[int, bytes] = {}

    def text(self, token: int) -> str:
        """The token as the vocabulary writes it."""
        found = self._text_of(token) if 0 <= token < self.size else None
        if found is None:
            raise RunError(
                f"token {token} is not in the vocabulary", expected=f"0 to {self.size - 1}"
            )
        return found

    def bytes_of(self, token: int) -> bytes:
        """The bytes that the token stands for; those of a control token are its name."""
        found = self._known.get(token)
        if found is None:
            text = self.text(token)
            is_literal = token in self._as_written
            found = text.encode("utf-8", "replace") if is_literal else self._read(text)
            self._known[token] = found
        return found

    def all_bytes(self) -> list[bytes]:
        """Bytes of every token; an unused number gives none."""
        return [
            self.bytes_of(token) if self._text_of(token) is not None else b""
            for token in range(self.size)
        ]
