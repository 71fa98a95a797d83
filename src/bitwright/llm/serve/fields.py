"""Typed access to the fields of a JSON request."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from bitwright.llm.serve.settings import ApiError

MISSING: Any = object()


def parse_body(body: bytes) -> dict[str, Any]:
    """The JSON object of a request."""
    try:
        found = json.loads(body)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8 at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(found, dict):
        raise ApiError(400, "the body is not a JSON object")
    return found


class Fields:
    """Takes fields out of a request; what nobody took is unknown."""

    def __init__(self, body: Mapping[str, Any], ignored: Iterable[str] = ()) -> None:
        self._body = {key: value for key, value in body.items() if value is not None}
        self._taken = set(ignored)

    def take(self, name: str, kinds: type | tuple[type, ...], default: Any = MISSING) -> Any:
        """The field; null counts as absent."""
        self._taken.add(name)
        value = self._body.get(name, MISSING)
        if value is MISSING:
            if default is MISSING:
                raise ApiError(400, f"the field {name!r} is missing", param=name)
            return default
        expected = kinds if isinstance(kinds, tuple) else (kinds,)
        is_wrong_bool = isinstance(value, bool) and bool not in expected
        if is_wrong_bool or not isinstance(value, expected):
            names = " or ".join(one.__name__ for one in expected)
            raise ApiError(400, f"{name} is {names}, found {type(value).__name__}", param=name)
        return value

    def refuse(self, name: str, *allowed: Any) -> None:
        """A field that is not supported, except for values that ask for nothing."""
        self._taken.add(name)
        value = self._body.get(name, MISSING)
        if value is not MISSING and value not in allowed:
            raise ApiError(400, f"{name} is not supported", param=name)

    def finish(self) -> None:
        """Raise for unknown fields."""
        unknown = sorted(map(str, self._body.keys() - self._taken))
        if unknown:
            raise ApiError(
                400,
                f"there is no field {unknown[0][:80]!r}",
                param=unknown[0][:80],
                code="unknown_parameter",
            )
