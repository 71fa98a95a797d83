"""Text to graph; a `ParseError` names line and column. Names of the last release are accepted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bitwright.aliases import ATTRIBUTES, OPS, current
from bitwright.errors import GraphError, ParseError
from bitwright.ir.dim import Dim
from bitwright.ir.dtype import DTYPES, DType
from bitwright.ir.graph import Graph, Node, Value
from bitwright.ir.lexer import Lexer
from bitwright.ir.payload import Array, array_from_nested, decode_blob
from bitwright.ir.printer import BOUNDARY_WORDS
from bitwright.ir.types import OpaqueType, TensorType, ValueType

_BOUNDARY = {word: op for op, word in BOUNDARY_WORDS.items()}
_MAX_NESTING = 64


class Parser:
    def __init__(self, text: str, blobs: Mapping[str, Array] | None = None) -> None:
        self.lexer = Lexer(text)
        self.blobs = blobs
        self.encoded = self._scan_data() if blobs is None else {}
        self.nesting = 0

    def _scan_data(self) -> dict[str, str]:
        """Read the data section first, so that a `#hash` resolves where it is met."""
        lexer, found = self.lexer, {}
        for at, token in enumerate(lexer.tokens[:-1]):
            if token.text == "data" and token.kind == "name" and lexer.tokens[at + 1].text == "{":
                start, lexer.at = lexer.at, at + 2
                while not lexer.accept("}"):
                    key = lexer.take("blob")
                    lexer.expect("=")
                    found[key] = lexer.take("string")[1:-1]
                lexer.at = start
        return found

    def whole(self) -> Graph:
        graph = self.graph()
        if self.lexer.peek.text == "data":
            while not self.lexer.accept("}"):
                if self.lexer.next().kind == "end":
                    raise self.lexer.fail("'}'")
        if self.lexer.peek.kind != "end":
            raise self.lexer.fail("the end of the text")
        return graph

    def graph(self) -> Graph:
        lexer = self.lexer
        self.nesting += 1
        if self.nesting > _MAX_NESTING:
            raise ParseError("graphs are nested too deeply", where=lexer.where())
        lexer.expect("graph")
        lexer.expect("@")
        name = lexer.string() if lexer.peek.kind == "string" else lexer.take("name")
        lexer.expect("{")
        nodes: list[Node] = []
        values: dict[str, Value] = {}
        updates: list[tuple[Value, Value]] = []
        meta: dict[str, str] = {}
        while not lexer.accept("return"):
            word = lexer.peek.text
            if lexer.peek.kind == "value":
                self._add(self._node(values), nodes, values)
            elif word in _BOUNDARY:
                self._add(self._boundary(), nodes, values)
            elif lexer.accept("meta"):
                key = lexer.string()
                lexer.expect("=")
                meta[key] = lexer.string()
            elif lexer.accept("bound"):
                symbol_name = lexer.take("name")
                lexer.expect("<=")
                lexer.bounds[symbol_name] = int(lexer.take("number"))
            elif lexer.accept("update"):
                state = self._value(values)
                lexer.expect("=")
                updates.append((state, self._value(values)))
            else:
                raise lexer.fail(
                    "a node, input, param, const, state, update, meta, bound or return"
                )
        outputs = lexer.listed(lambda: self._output(values), "}")
        self.nesting -= 1
        return Graph(name, tuple(nodes), tuple(outputs), tuple(updates), meta)

    def _add(self, node: Node, nodes: list[Node], values: dict[str, Value]) -> None:
        for value in node.outputs:
            if value.name in values:
                raise ParseError(f"{value} is defined twice", where=self.lexer.where())
            values[value.name] = value
        nodes.append(node)

    def _output(self, values: dict[str, Value]) -> tuple[str, Value]:
        value = self._value(values)
        return (self.lexer.string() if self.lexer.accept("as") else value.name), value

    def _value(self, values: dict[str, Value]) -> Value:
        offset = self.lexer.peek.offset
        name = self.lexer.value_name()
        if name not in values:
            where = self.lexer.where(offset)
            raise ParseError(f"%{name} is used before it is defined", where=where)
        return values[name]

    def _boundary(self) -> Node:
        lexer = self.lexer
        op = _BOUNDARY[lexer.next().text]
        name = lexer.value_name()
        lexer.expect(":")
        type_ = self.type()
        attrs: dict[str, Any] = {}
        if lexer.accept("="):
            attrs["value"] = self.array(type_)
        elif op == "constant":
            raise lexer.fail("'=' and a value")
        if op == "parameter":
            attrs["trainable"] = not lexer.accept("frozen")
        return Node(op, (), attrs, (type_,), (name,), self._loc())

    def _node(self, values: dict[str, Value]) -> Node:
        lexer = self.lexer
        names = [lexer.value_name()]
        while lexer.accept(","):
            names.append(lexer.value_name())
        lexer.expect("=")
        op = current(OPS, lexer.take("name"), "op")
        lexer.expect("(")
        inputs = lexer.listed(lambda: None if lexer.accept("none") else self._value(values), ")")
        attrs = {}
        if lexer.accept("{"):
            attrs = dict(lexer.listed(self._named_attr, "}"))
        lexer.expect(":")
        types = [self.type()]
        while lexer.accept(","):
            types.append(self.type())
        if len(types) != len(names):
            raise ParseError(
                f"{op} has {len(names)} results and {len(types)} types", where=lexer.where()
            )
        return Node(op, tuple(inputs), attrs, tuple(types), tuple(names), self._loc())

    def _loc(self) -> str:
        return self.lexer.string() if self.lexer.accept("at") else ""

    def _named_attr(self) -> tuple[str, Any]:
        key = self.lexer.take("name")
        self.lexer.expect("=")
        return current(ATTRIBUTES, key, "attribute"), self.attr()

    def type(self) -> ValueType:
        lexer = self.lexer
        offset = lexer.peek.offset
        name = lexer.take("name")
        if name == "host":
            lexer.expect("<")
            words, depth = [], 0
            while depth or lexer.peek.text != ">":
                depth += {"<": 1, ">": -1}.get(lexer.peek.text, 0)
                if lexer.peek.kind == "end":
                    raise lexer.fail("'>'")
                words.append(lexer.next().text)
            lexer.expect(">")
            return OpaqueType("".join(words))
        if name not in DTYPES:
            raise ParseError(
                f"no element type is named {name!r}",
                where=lexer.where(offset),
                expected=", ".join(DTYPES),
            )
        lexer.expect("[")
        return TensorType(DTYPES[name], tuple(lexer.listed(lexer.size, "]")))

    def array(self, type_: ValueType) -> Array:
        offset = self.lexer.peek.offset
        if not isinstance(type_, TensorType) or not type_.is_static:
            raise ParseError(f"a {type_} cannot have a value", where=self.lexer.where(offset))
        if self.lexer.peek.kind == "blob":
            key = self.lexer.next().text
            if self.blobs is not None and key in self.blobs:
                return self.blobs[key]
            if key in self.encoded:
                return decode_blob(self.encoded[key], type_)
            raise ParseError(f"the data section has no {key}", where=self.lexer.where(offset))
        return array_from_nested(self.attr(), type_)

    def attr(self) -> Any:
        lexer = self.lexer
        token = lexer.peek
        if token.kind == "string":
            return lexer.string()
        if lexer.accept("["):
            self.nesting += 1
            if self.nesting > _MAX_NESTING:
                raise ParseError("lists are nested too deeply", where=lexer.where())
            items = tuple(lexer.listed(self.attr, "]"))
            self.nesting -= 1
            return items
        if token.kind == "name":
            if token.text in _WORDS:
                lexer.next()
                return _WORDS[token.text]
            if token.text == "graph":
                return self.graph()
            if token.text == "tensor":
                return self._tensor()
        if token.text == "-" and lexer.tokens[lexer.at + 1].text in ("inf", "nan"):
            lexer.next()
            return -_WORDS[lexer.next().text]  # type: ignore[operator]
        return self._number()

    def _tensor(self) -> Array:
        self.lexer.expect("tensor")
        self.lexer.expect("<")
        type_ = self.type()
        self.lexer.expect("=")
        array = self.array(type_)
        self.lexer.expect(">")
        return array

    def _number(self) -> int | float | Dim:
        """A float literal, or an expression over sizes (a plain integer among them)."""
        lexer = self.lexer
        negative = lexer.peek.text == "-"
        token = lexer.tokens[lexer.at + 1] if negative else lexer.peek
        if token.kind == "number" and not token.text.isdigit():
            lexer.at += 2 if negative else 1
            return -float(token.text) if negative else float(token.text)
        return lexer.size()


_WORDS: dict[str, bool | float | DType | None] = {
    "none": None,
    "true": True,
    "false": False,
    "inf": float("inf"),
    "nan": float("nan"),
    **DTYPES,
}


def parse(text: str, blobs: Mapping[str, Array] | None = None) -> Graph:
    """A graph from its text. `blobs` resolves `#hash` arrays when the text has no data section."""
    try:
        return Parser(text, blobs).whole()
    except RecursionError:
        raise ParseError("the text is nested too deeply") from None
    except ParseError:
        raise
    except GraphError as error:
        raise ParseError(str(error)) from None


def parse_type(text: str) -> ValueType:
    """A type from its text: `f32[batch, 784]`."""
    parser = Parser(text, {})
    type_ = parser.type()
    if parser.lexer.peek.kind != "end":
        raise parser.lexer.fail("the end of the type")
    return type_
