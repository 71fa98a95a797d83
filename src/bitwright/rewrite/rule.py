"""A rewrite is data: a name, a pattern, its replacement in the same syntax, and refusals.

    Rule("relu-of-relu", lambda op, x: op.relu(op.relu(x)), lambda op, x: op.relu(x))

`replace` receives the variables it names among its parameters, and the `Match` as `m`. `unless`
gets the match and answers the reason why the rule must not fire, or anything false.

A rule keeps no state between `unless` and `replace`. What both need is a function of the match:
`Rule.from_plan` calls it once per match (`Match.memo`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from bitwright.rewrite.match import Match
from bitwright.rewrite.pattern import OpPattern, make_pattern, parameter_names

T = TypeVar("T")


@dataclass(frozen=True)
class Rule:
    name: str
    match: Callable[..., Any]
    replace: Callable[..., Any]
    unless: Callable[[Match], Any] | None = None

    @cached_property
    def pattern(self) -> OpPattern:
        return make_pattern(self.match)

    @cached_property
    def _wanted(self) -> tuple[str, ...]:
        return parameter_names(self.replace)

    @staticmethod
    def from_plan(
        name: str,
        match: Callable[..., Any],
        plan: Callable[[Match], T | str],
        replace: Callable[[Any, Match, T], Any],
    ) -> Rule:
        """A rule whose `plan` returns what `replace(op, m, plan)` needs, or a refusal as a str."""

        def unless(m: Match) -> str:
            found = m.memo(plan)
            return found if isinstance(found, str) else ""

        def apply(op: Any, m: Match) -> Any:
            found = m.memo(plan)
            assert not isinstance(found, str)
            return replace(op, m, found)

        return Rule(name, match, apply, unless)

    def refusal(self, m: Match) -> str:
        """Why the rule does not apply to this match; empty if it does."""
        reason = self.unless(m) if self.unless else None
        return str(reason) if reason else ""

    def apply(self, op: Any, m: Match) -> Any:
        arguments = {name: m if name == "m" else m.bindings[name] for name in self._wanted}
        return self.replace(op, **arguments)
