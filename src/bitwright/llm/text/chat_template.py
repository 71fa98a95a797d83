"""Chat templates: jinja2 in a sandbox, with bounds on steps, time and the size of texts.

A template comes with the model file, so it is not trusted. It reaches nothing outside the sandbox
(jinja2's immutable one), each pass through a loop or macro counts as a step, and no text that it
makes is longer than `MAX_CHARACTERS`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from bitwright.errors import RunError
from bitwright.llm.text.library import need

MAX_STEPS = 200_000
MAX_SECONDS = 5.0
MAX_CHARACTERS = 4_000_000
_STEP, _JOIN, _MEASURE = "step_", "joined_", "measured_"
_FORBIDDEN = frozenset(
    ("ljust", "rjust", "center", "zfill", "expandtabs", "translate", "encode", "to_bytes")
)
_FILTERS_LEFT_OUT = (
    *("center", "format", "indent", "wordwrap", "xmlattr", "urlize", "pprint", "batch", "slice"),
    *("groupby", "filesizeformat", "truncate"),
)
_WHERE = "chat template"


class TemplateError(RunError):
    """A chat template that cannot be used, or that refuses the messages."""


class _Limits:
    """Counts steps and bounds sizes during one rendering."""

    def __init__(self) -> None:
        self.steps, self.characters = 0, 0
        self.end = time.monotonic() + MAX_SECONDS

    def step(self) -> str:
        self.steps += 1
        if self.steps > MAX_STEPS or (self.steps % 64 == 0 and time.monotonic() > self.end):
            raise TemplateError(
                "it does not end",
                where=_WHERE,
                expected=f"at most {MAX_STEPS:,} steps and {MAX_SECONDS:g} s",
            )
        return ""

    def require(self, characters: float) -> None:
        if characters > MAX_CHARACTERS:
            raise TemplateError(
                "it makes a text that is too long",
                where=_WHERE,
                expected=f"at most {MAX_CHARACTERS:,} characters",
            )

    def measured(self, value: Any) -> Any:
        """The value, if all that it holds is not too much."""
        self.check_time()
        rest, size = [value], 0
        while rest:
            one = rest.pop()
            size += _size(one)
            self.require(size)
            if isinstance(one, dict):
                rest += one.values()
            elif isinstance(one, list | tuple):
                rest += one
            if len(rest) % 1024 == 1:
                self.check_time()
        return value

    def check_time(self) -> None:
        if time.monotonic() > self.end:
            self.steps = MAX_STEPS
            self.step()

    def joined(self, *parts: Any) -> str:
        texts = [str(self.measured(part)) for part in parts]
        self.require(sum(map(len, texts)))
        return "".join(texts)


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple | dict) else 1


def _environment() -> tuple[Any, Any]:
    """The sandbox, and the holder of the limits of the rendering that uses it."""
    sandbox = need("jinja2.sandbox")
    nodes, visitor = need("jinja2.nodes"), need("jinja2.visitor")
    limits = _Limits()

    def count(node: Any) -> Any:
        return nodes.Output([call(_STEP, [], node)]).set_lineno(node.lineno)

    def call(name: str, arguments: list[Any], node: Any) -> Any:
        made = nodes.Call(nodes.Name(name, "load"), arguments, [], None, None)
        return made.set_lineno(node.lineno)

    class Counting(visitor.NodeTransformer):  # type: ignore[misc, name-defined]
        """Counts passes through loops and macros; measures containers, `a ~ b` and filters."""

        def _is_result(self, node: Any) -> bool:
            """Whether it is a filter of a value; the first one of a block has no value."""
            first = node
            while isinstance(first, nodes.Filter) and isinstance(first.node, nodes.Filter):
                first = first.node
            return isinstance(first, nodes.Filter) and first.node is not None

        def visit(self, node: Any, *args: Any, **kwargs: Any) -> Any:
            self.generic_visit(node)
            if isinstance(node, nodes.For | nodes.Macro):
                node.body.insert(0, count(node))
            elif isinstance(node, nodes.Concat):
                return call(_JOIN, node.nodes, node)
            elif (
                isinstance(node, nodes.List | nodes.Dict)
                or self._is_result(node)
                or (isinstance(node, nodes.Tuple) and node.ctx == "load")
            ):
                return call(_MEASURE, [node], node)
            return node

    class Environment(sandbox.ImmutableSandboxedEnvironment):  # type: ignore[misc, name-defined]
        intercepted_binops = frozenset(("+", "*", "**", "%"))

        def _parse(self, *args: Any) -> Any:
            return Counting().visit(super()._parse(*args))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "+":
                limits.require(_size(left) + _size(right))
            elif operator == "*":
                factors = [x if isinstance(x, int) else _size(x) for x in (left, right)]
                limits.require(abs(factors[0] * factors[1]) if _is_big(left, right) else 0)
            elif operator == "**":
                limits.require(abs(right) * 64 if isinstance(right, int) and right > 64 else 0)
                limits.require(abs(left) if isinstance(left, int) else 0)
            elif isinstance(left, str):
                raise TemplateError("it formats with %, which is not allowed", where=_WHERE)
            return super().call_binop(context, operator, left, right)

        def is_safe_attribute(self, value: Any, name: str, attribute: Any) -> bool:
            if name in _FORBIDDEN and isinstance(value, str | bytes | int):
                return False
            return bool(super().is_safe_attribute(value, name, attribute))

        def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
            owner = getattr(function, "__self__", None)
            if isinstance(owner, str):
                _check_method(limits, owner, getattr(function, "__name__", ""), args)
            return limits.measured(super().call(context, function, *args, **kwargs))

        def wrap_str_format(self, value: Any) -> Any:
            owner, name = getattr(value, "__self__", None), getattr(value, "__name__", "")
            if isinstance(owner, str) and name in ("format", "format_map"):
                raise TemplateError("it uses str.format, which is not allowed", where=_WHERE)
            return None

    made = Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols"],
        finalize=limits.measured,
    )
    for name in _FILTERS_LEFT_OUT:
        made.filters.pop(name, None)
    for name in ("replace", "join"):
        made.filters[name] = _checked_filter(limits, name, made.filters[name])
    made.filters["tojson"] = _to_json
    made.filters["round"] = _round
    made.filters["sum"] = _sum
    made.filters["indent"] = _indent
    made.globals.pop("lipsum", None)
    made.globals |= {
        _STEP: limits.step,
        _JOIN: limits.joined,
        _MEASURE: limits.measured,
        "raise_exception": _refuse,
        "strftime_now": lambda form: datetime.now().strftime(str(form)[:200]),
    }
    return made, limits


def _is_big(left: Any, right: Any) -> bool:
    """Whether a product repeats a text or list, or has a huge number in it."""
    return not (isinstance(left, int | float) and isinstance(right, int | float)) or any(
        isinstance(x, int) and abs(x) > 1 << 62 for x in (left, right)
    )


def _check_method(limits: _Limits, text: str, name: str, args: Sequence[Any]) -> None:
    if name == "replace" and len(args) > 1:
        limits.require((len(text) + 1) * (_size(args[1]) + 1))
    elif name == "join" and args:
        items = limits.measured(list(args[0]))
        limits.require(sum(map(_size, items)) + len(text) * len(items))


def _checked_filter(limits: _Limits, name: str, function: Any) -> Any:
    """A filter of jinja2 whose result is measured before it is made."""
    passes_eval = getattr(function, "jinja_pass_arg", None)
    offset = 1 if passes_eval is not None else 0

    def call(*args: Any, **kwargs: Any) -> Any:
        value = args[offset]
        rest = [*args[offset + 1 :], *kwargs.values()]
        if name == "replace":
            limits.require((_size(value) + 1) * (max(map(_size, rest), default=0) + 1))
        elif not isinstance(value, str):
            value = list(value)
            between = _size(rest[0]) if rest else 0
            limits.measured(value)
            limits.require(sum(map(_size, value)) + between * len(value))
            args = (*args[:offset], value, *args[offset + 1 :])
        return function(*args, **kwargs)

    if passes_eval is not None:
        call.jinja_pass_arg = passes_eval  # type: ignore[attr-defined]
    return call


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
    small = None if indent is None else min(int(indent), 16)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=small)


def _indent(text: Any, width: int = 4, first: bool = False, blank: bool = False) -> str:
    margin = " " * min(int(width), 64)
    lines = str(text).split("\n")
    return "\n".join(
        margin + line if (number or first) and (line or blank) else line
        for number, line in enumerate(lines)
    )


def _round(value: Any, precision: int = 0, method: str = "common") -> Any:
    """jinja2's filter for at most 15 digits: it computes 10**precision."""
    digits = max(-15, min(int(precision), 15))
    if method == "common":
        return round(float(value), digits)
    whole = {"ceil": math.ceil, "floor": math.floor}[method]
    return whole(float(value) * 10.0**digits) / 10.0**digits


def _sum(values: Iterable[Any], attribute: str | None = None, start: Any = 0) -> Any:
    """A sum of numbers: adding lists one by one takes quadratic time."""
    listed = [one if attribute is None else one[attribute] for one in values]
    if not all(isinstance(one, int | float) for one in (start, *listed)):
        raise TemplateError("it sums what is not a number", where=_WHERE)
    return sum(listed, start)


def _refuse(message: Any = "") -> None:
    raise TemplateError(f"it refuses these messages: {str(message)[:500]}", where=_WHERE)


class ChatTemplate:
    """Renders messages as the prompt text that the model was trained on."""

    def __init__(self, text: str) -> None:
        self.text = text
        if len(text) > 1_000_000:
            raise TemplateError("it is too long", where=_WHERE, expected="at most 1 MB")
        self._compile()

    def _compile(self) -> tuple[Any, Any]:
        environment, limits = _environment()
        errors = need("jinja2").TemplateError
        try:
            return environment.from_string(self.text), limits
        except errors as error:
            line = getattr(error, "lineno", None)
            where = f"{_WHERE}, line {line}" if line else _WHERE
            raise TemplateError(f"it cannot be read: {error}", where=where) from None
        except (RecursionError, OverflowError, MemoryError, ValueError, SyntaxError) as error:
            raise TemplateError(
                f"it cannot be read: {type(error).__name__}", where=_WHERE
            ) from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        guard: Callable[[str], str] = lambda text: text,
        **values: Any,
    ) -> str:
        """The prompt of a conversation. `guard` changes every text of the messages.

        `values` are what templates read: `add_generation_prompt`, `bos_token`, `eos_token`, ...
        """
        template, limits = self._compile()
        known = {"add_generation_prompt": True, "tools": None, "documents": None} | values
        try:
            parts = []
            for part in template.generate(messages=guarded(list(messages), guard), **known):
                parts.append(part)
                limits.characters += len(part)
                limits.require(limits.characters)
            return "".join(parts)
        except TemplateError:
            raise
        except RecursionError:
            raise TemplateError("it calls itself without an end", where=_WHERE) from None
        except Exception as error:  # whatever the template provokes
            raise TemplateError(
                f"it fails: {type(error).__name__}: {str(error)[:300]}", where=_WHERE
            ) from None


def guarded(value: Any, guard: Callable[[str], str]) -> Any:
    """The same value with every text in it guarded."""
    if isinstance(value, str):
        return guard(value)
    if isinstance(value, Mapping):
        return {guarded(key, guard): guarded(item, guard) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [guarded(item, guard) for item in value]
    return value


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages with a role and a text; parts of kind `text` are joined."""
    if not isinstance(messages, list | tuple) or not messages:
        raise RunError("messages are a list with at least one message", where="messages")
    checked = []
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RunError("a message is an object with a role", where=where)
        checked.append({**message, "content": _content(message.get("content"), where)})
    return checked


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if isinstance(content, list | tuple):
        parts = []
        for number, part in enumerate(content):
            if not (
                isinstance(part, Mapping)
                and part.get("type") == "text"
                and isinstance(part.get("text"), str)
            ):
                raise RunError(
                    "only parts of type 'text' are understood",
                    where=f"{where}.content[{number}]",
                )
            parts.append(part["text"])
        return "".join(parts)
    raise RunError("the content is a text", where=where, found=type(content).__name__)
