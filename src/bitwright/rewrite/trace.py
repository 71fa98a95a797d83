"""Events of rewriting (rules fired and refused), which `explain` shows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Event:
    """A rule that fired on a node, or was refused for a reason."""

    stage: str
    rule: str
    node: str
    fired: bool
    reason: str = ""
    made: tuple[str, ...] = ()
    """Names of the values that replaced the node's results, if it fired."""

    def __str__(self) -> str:
        outcome = (
            f"fired, giving {', '.join(self.made)}" if self.fired else f"refused: {self.reason}"
        )
        return f"{self.stage}: {self.rule} on %{self.node} {outcome}"


class Trace:
    """Events in order; equal refusals are recorded once per stage."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.stage = ""
        self._seen: set[tuple[str, str, str, str]] = set()

    def fired(self, rule: str, node: str, made: Iterable[str], reason: str = "") -> None:
        self.events.append(Event(self.stage, rule, node, True, reason, tuple(made)))

    def refused(self, rule: str, node: str, reason: str) -> None:
        key = (self.stage, rule, node, reason)
        if key not in self._seen:
            self._seen.add(key)
            self.events.append(Event(self.stage, rule, node, False, reason))

    def about(self, name: str) -> Iterator[Event]:
        """Events of this node and of the values that replaced it."""
        names = {name}
        for event in self.events:
            if event.node in names:
                names.update(event.made)
                yield event
            elif names & set(event.made):
                yield event
