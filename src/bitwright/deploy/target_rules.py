"""What the rules of every target runtime share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from onnx import NodeProto

from bitwright.deploy.view import GraphView, Verdict


class TargetRules(ABC):
    """Predictions for one graph."""

    def __init__(self, view: GraphView) -> None:
        self.view = view

    def verdicts(self) -> Iterator[Verdict]:
        for node in self.view.nodes:
            verdict = self.verdict(node)
            if verdict is not None:
                yield verdict

    @abstractmethod
    def verdict(self, node: NodeProto) -> Verdict | None:
        """The prediction for a node; None if it has nothing to do with quantization."""
