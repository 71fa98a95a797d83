"""Text from tokens as they arrive: bytes of an unfinished character wait for the rest."""

from __future__ import annotations

import codecs

from bitwright.llm.text.vocabulary import Vocabulary


class StreamDecoder:
    """Decodes one token at a time. What is no UTF-8 becomes U+FFFD."""

    def __init__(
        self, vocabulary: Vocabulary, *, shows_control: bool = False, strips_space: bool = False
    ) -> None:
        self._vocabulary, self._shows_control = vocabulary, shows_control
        self._strips_space = strips_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        """The text that this token completes; often all of its own, sometimes none."""
        if not self._shows_control and token in self._vocabulary.control:
            return ""
        data = self._vocabulary.bytes_of(token)
        if self._strips_space and data:
            self._strips_space = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What is left when no token follows: U+FFFD for an unfinished character."""
        return self._decoder.decode(b"", final=True)
