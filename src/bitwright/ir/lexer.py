"""Tokens of the textual form, with line and column."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from bitwright.errors import ParseError
from bitwright.ir.dim import FUNCTIONS, Size, symbol
from bitwright.ir.substitute import apply_function

T = TypeVar("T")
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./\-$]*\Z|/[A-Za-z0-9_./\-$]*\Z")
_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n]+|\#\#[^\n]*)
      | (?P<string>"(?:[^"\\\n]|\\.)*")
      | (?P<value>%(?:[A-Za-z0-9_./\-$]+|"(?:[^"\\\n]|\\.)*"))
      | (?P<blob>\#[0-9a-f]+)
      | (?P<number>(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?)
      | (?P<name>[A-Za-z_][A-Za-z0-9_.]*)
      | (?P<mark><=|//|[=(){}\[\],:<>+\-*@])""",
    re.VERBOSE,
)


class Token(NamedTuple):
    kind: str
    text: str
    offset: int


class Lexer:
    """A cursor over the tokens of one text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: list[Token] = []
        self.at = 0
        position = 0
        while position < len(text):
            match = _TOKEN.match(text, position)
            if not match:
                raise ParseError(
                    f"unexpected character {text[position]!r}", where=self.where(position)
                )
            if match.lastgroup != "space":
                self.tokens.append(Token(match.lastgroup or "", match.group(), position))
            position = match.end()
        self.tokens.append(Token("end", "", len(text)))
        self.bounds: dict[str, int] = {}

    def where(self, offset: int | None = None) -> str:
        offset = self.tokens[self.at].offset if offset is None else offset
        line = self.text.count("\n", 0, offset) + 1
        return f"line {line}, column {offset - self.text.rfind(chr(10), 0, offset)}"

    @property
    def peek(self) -> Token:
        return self.tokens[self.at]

    def next(self) -> Token:
        token = self.tokens[self.at]
        self.at = min(self.at + 1, len(self.tokens) - 1)
        return token

    def fail(self, expected: str) -> ParseError:
        return ParseError(
            "the text does not parse",
            where=self.where(),
            expected=expected,
            found=repr(self.peek.text) if self.peek.text else "the end",
        )

    def accept(self, text: str) -> bool:
        if self.peek.text == text and self.peek.kind in ("mark", "name"):
            self.at += 1
            return True
        return False

    def expect(self, text: str) -> None:
        if not self.accept(text):
            raise self.fail(repr(text))

    def take(self, kind: str) -> str:
        if self.peek.kind != kind:
            raise self.fail(f"a {kind}")
        return self.next().text

    def string(self) -> str:
        return self._unquote(self.take("string"))

    def value_name(self) -> str:
        text = self.take("value")[1:]
        return self._unquote(text) if text.startswith('"') else text

    def _unquote(self, text: str) -> str:
        try:
            return str(json.loads(text))
        except ValueError:
            raise ParseError(f"{text} is not a string", where=self.where()) from None

    def listed(self, item: Callable[[], T], close: str) -> list[T]:
        """Items separated by commas up to the closing mark, which is consumed."""
        items: list[T] = []
        while not self.accept(close):
            if items:
                self.expect(",")
            items.append(item())
        return items

    # sizes: sum := term (+|- term)*, term := factor (*|// factor)*
    def size(self) -> Size:
        return self._sum(0)

    def _sum(self, depth: int) -> Size:
        if depth > 200:
            raise ParseError("a size is nested too deeply", where=self.where())
        total: Size = -self._term(depth) if self.accept("-") else self._term(depth)
        while self.peek.text in ("+", "-"):
            sign = self.next().text
            term = self._term(depth)
            total = total + term if sign == "+" else total - term
        return total

    def _term(self, depth: int) -> Size:
        total = self._factor(depth)
        while self.peek.text in ("*", "//"):
            mark = self.next().text
            factor = self._factor(depth)
            total = total * factor if mark == "*" else total // factor
        return total

    def _factor(self, depth: int) -> Size:
        if self.peek.kind == "number":
            text = self.next().text
            if not text.isdigit():
                raise self.fail("a whole number")
            return int(text)
        if self.accept("("):
            inner = self._sum(depth + 1)
            self.expect(")")
            return inner
        name = self.take("name")
        if name in FUNCTIONS and self.accept("("):
            left = self._sum(depth + 1)
            self.expect(",")
            right = self._sum(depth + 1)
            self.expect(")")
            return apply_function(name, left, right)
        return symbol(name, self.bounds.get(name))


def parse_size(text: str) -> Size:
    """A size from its text: `batch`, `2*seq`, `(h+1)//2`."""
    lexer = Lexer(text)
    result = lexer.size()
    lexer.take("end")
    return result


def show_name(name: str) -> str:
    return f"%{name}" if PLAIN_NAME.match(name) else f"%{json.dumps(name)}"
