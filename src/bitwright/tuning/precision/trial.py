"""A trial: one model that was built, timed and perhaps scored; and how models are built."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from bitwright.ir.graph import Graph
from bitwright.pipeline import PRECISION
from bitwright.quant.model.quantize import Quantized, float_policy_of, quantize
from bitwright.quant.model.recipe import recipe as find_recipe
from bitwright.quant.model.report import QuantizationReport
from bitwright.warn import DataWarning

FLOAT_NAME = "float"
INT8_NAME = "int8"
Model = Quantized | Graph
OBJECTIVES = ("latency", "size", "memory")


@dataclass
class Trial:
    """What is known about one model."""

    name: str
    recipe: dict[str, Any]
    precisions: dict[str, str] = field(default_factory=dict)
    """By unit."""
    latency: float = math.inf
    """Seconds of a run: the median relative to the float model's, times the float model's."""
    nbytes: int = 0
    memory: int = 0
    score: float | None = None
    """None if the model was not faster, so that nothing would follow from its score."""
    error: float | None = None
    """Measured output error energy relative to the signal, on held-out batches."""
    predicted_error: float | None = None
    predicted_latency: float | None = None

    @property
    def key(self) -> str:
        return recipe_key(self.recipe)

    def value(self, objective: str) -> float:
        """What the objective minimizes."""
        return {"latency": self.latency, "size": self.nbytes, "memory": self.memory}[objective]

    def to_json(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Trial:
        return cls(**{one.name: found[one.name] for one in fields(cls)})


def recipe_key(recipe: Mapping[str, Any]) -> str:
    return json.dumps(recipe, sort_keys=True)


class ModelBuilder:
    """Builds the model of a recipe from saved statistics, exactly as `bw.quantize` does."""

    def __init__(self, graph: Graph, statistics: Path, threads: int | None) -> None:
        self.graph, self.statistics, self.threads = graph, statistics, threads

    def build(self, recipe: Mapping[str, Any]) -> Model:
        """A quantized model, or the float graph for a recipe without targets."""
        rules = find_recipe(recipe)
        if not rules.targets and rules.attention == "float":
            policy = float_policy_of(rules.float_precision)
            if policy.is_plain:
                return self.graph
            return self.graph.with_(meta={**self.graph.meta, PRECISION: policy.to_json()})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DataWarning)
            return quantize(
                self.graph, None, rules, statistics=self.statistics, threads=self.threads
            )


def graph_of(model: Model) -> Graph:
    return model.graph if isinstance(model, Quantized) else model


def schemes_in(report: QuantizationReport) -> dict[str, str]:
    """The scheme that each layer got, by path."""
    return {layer.value: layer.scheme for layer in report.layers}
