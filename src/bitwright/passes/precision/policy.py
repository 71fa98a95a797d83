"""Precision policies: which element type each kind of op computes in.

| policy               | compute | reduction | elementwise | movement | boundary |
|----------------------|---------|-----------|-------------|----------|----------|
| `f32`                | f32     | f32       | f32         | f32      | own      |
| `f16`                | f16     | f16       | f16         | f16      | own      |
| `mixed_conservative` | f16     | f32       | f16         | f16      | own      |
| `mixed`              | f16     | f16       | f16         | f16      | own      |
| `mixed_bf16`         | bf16    | bf16      | bf16        | bf16     | own      |
| `custom`             | the given map; missing kinds are f32               | own      |

f16 and bf16 reductions always accumulate in f32, so `f16` and `mixed` run the same. f32 stands for
full precision: f64 ops stay f64.

A policy has a text form, `name` or `name:key=type,…`. Keys are kinds, `op:PATTERN` and
`layer:PATTERN` (shell patterns of op names; of value, weight and module names or source locations):

    mixed_bf16:op:softmax=f32,layer:*head*=f32
    custom:compute=f16

and a JSON form, {"base": …, "kinds": {…}, "ops": {…}, "layers": {…}}, with any characters in
patterns.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from bitwright.errors import BitwrightError
from bitwright.ir.dtype import DType, bf16, f16, f32
from bitwright.ir.graph import Graph, Node, nearest
from bitwright.ir.naming import names_of, near_misses
from bitwright.ops.core.opdef import Kind
from bitwright.ops.core.registry import all_ops, get

PRECISIONS = {element.name: element for element in (f32, f16, bf16)}
_KINDS = (Kind.COMPUTE, Kind.REDUCTION, Kind.ELEMENTWISE, Kind.MOVEMENT)
_TABLE = {
    "f32": (f32, f32, f32, f32),
    "f16": (f16, f16, f16, f16),
    "mixed_conservative": (f16, f32, f16, f16),
    "mixed": (f16, f16, f16, f16),
    "mixed_bf16": (bf16, bf16, bf16, bf16),
    "custom": (f32, f32, f32, f32),
}
POLICIES = tuple(_TABLE)


def kind_of(op: str) -> Kind:
    """The kind of an op in a policy; a cast counts as movement."""
    return Kind.MOVEMENT if op == "cast" else get(op).kind


@dataclass(frozen=True)
class Policy:
    """The precision of each kind, and of the ops and layers that patterns name.

    The last matching pattern counts; patterns of layers take precedence over those of ops.
    """

    name: str
    kinds: Mapping[Kind, DType]
    ops: Mapping[str, DType] = field(default_factory=dict)
    layers: Mapping[str, DType] = field(default_factory=dict)

    @property
    def is_plain(self) -> bool:
        """Whether it is f32 everywhere, so that no graph changes."""
        return all(p == f32 for m in (self.kinds, self.ops, self.layers) for p in m.values())

    def of_kind(self, kind: Kind) -> DType | None:
        """The precision of a kind; None for boundaries, whose types do not change."""
        return None if kind is Kind.BOUNDARY else self.kinds.get(kind, f32)

    def of_pattern(self, node: Node) -> DType | None:
        """The precision that a pattern gives this node; None if none matches."""
        named = (*names_of(node), node.loc) if self.layers else ()
        for patterns, names in ((self.layers, named), (self.ops, (node.op,))):
            matching = [p for t, p in patterns.items() if any(fnmatchcase(n, t) for n in names)]
            if matching:
                return matching[-1]
        return None

    def of(self, node: Node) -> DType | None:
        return self.of_pattern(node) or self.of_kind(kind_of(node.op))

    def to_json(self) -> str:
        """The JSON form, which `policy` reads."""
        parts = {"ops": self.ops, "layers": self.layers}
        named = {part: {k: str(p) for k, p in map_.items()} for part, map_ in parts.items()}
        kinds = {kind.value: str(p) for kind, p in self.kinds.items()}
        return json.dumps({"base": self.name, "kinds": kinds, **named})

    def __str__(self) -> str:
        """The text form, which `policy` reads."""
        base = dict(zip(_KINDS, _TABLE.get(self.name, _TABLE["custom"]), strict=True))
        words = [f"{k.value}={p}" for k, p in self.kinds.items() if base.get(k) != p]
        words += [f"op:{pattern}={p}" for pattern, p in self.ops.items()]
        words += [f"layer:{pattern}={p}" for pattern, p in self.layers.items()]
        return f"{self.name}:{','.join(words)}" if words else self.name


def require_layers(given: Policy, graphs: Iterable[Graph]) -> None:
    """Raise for a pattern that matches no layer of the graphs, or no op, with near misses."""
    for pattern in given.ops:
        if not any(fnmatchcase(name, pattern) for name in all_ops()):
            raise _no_match("op", pattern, all_ops())
    if not given.layers:
        return
    found: dict[str, None] = {}
    for _, node in (pair for graph in graphs for pair in graph.walk()):
        if not node.is_boundary:
            found.update(dict.fromkeys((*names_of(node), node.loc)))
    for pattern in given.layers:
        if not any(fnmatchcase(name, pattern) for name in found):
            raise _no_match("layer", pattern, found)


def _no_match(what: str, pattern: str, names: Iterable[str]) -> BitwrightError:
    return BitwrightError(
        f"pattern {pattern!r} of the precision policy matches no {what}",
        expected="the name of an op" if what == "op" else "the name of a layer or of its weight",
        hint=near_misses(pattern, names),
    )


def custom(
    kinds: Mapping[str, Any] | None = None,
    ops: Mapping[str, Any] | None = None,
    layers: Mapping[str, Any] | None = None,
    base: str = "custom",
) -> Policy:
    """A policy with precisions by kind, op pattern and layer pattern on top of `base`."""
    if base not in _TABLE:
        raise BitwrightError(
            f"there is no precision {base!r}",
            expected=", ".join(POLICIES),
            hint=nearest(base, POLICIES),
        )
    found = dict(zip(_KINDS, _TABLE[base], strict=True))
    by_name = {kind.value: kind for kind in _KINDS}
    for name, precision in (kinds or {}).items():
        if name not in by_name:
            raise BitwrightError(
                f"there is no op kind {name!r} that a precision can be given for",
                expected=", ".join(by_name),
                hint=nearest(name, by_name),
            )
        found[by_name[name]] = _precision(precision)
    patterns = [{p: _precision(v) for p, v in (given or {}).items()} for given in (ops, layers)]
    return Policy(base, found, *patterns)


def policy(given: str | Policy | Mapping[str, Any]) -> Policy:
    """A policy from its name, its text form, or a map with `kinds`, `ops`, `layers`, `base`."""
    if isinstance(given, Policy):
        return given
    if isinstance(given, Mapping):
        if unknown := set(given) - {"kinds", "ops", "layers", "base"}:
            raise BitwrightError(
                f"a precision policy has no part {min(map(str, unknown))!r}",
                expected="kinds, ops, layers, base",
            )
        return custom(**given)
    if str(given).startswith("{"):
        return _from_json(str(given))
    name, _, words = str(given).partition(":")
    parts: dict[str, dict[str, str]] = {"kinds": {}, "ops": {}, "layers": {}}
    for word in filter(None, words.split(",")):
        key, equals, precision = word.rpartition("=")
        if not equals:
            raise BitwrightError(
                f"{word!r} gives no precision", expected="KIND, op:PATTERN or layer:PATTERN =TYPE"
            )
        what, colon, pattern = key.partition(":")
        if colon and what in ("op", "layer"):
            parts[f"{what}s"][pattern] = precision
        else:
            parts["kinds"][key] = precision
    return custom(base=name, **parts)


def _from_json(text: str) -> Policy:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise BitwrightError(f"the precision policy is not JSON: {error}") from None
    return policy(found)


def _precision(given: Any) -> DType:
    found = PRECISIONS.get(str(given))
    if found is None:
        raise BitwrightError(f"{given!r} is not a precision", expected=", ".join(PRECISIONS))
    return found
