"""The result of a search."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from bitwright.ir.container import write_atomically
from bitwright.ir.graph import Graph
from bitwright.tuning.precision.trial import Model, graph_of


@dataclass(repr=False)
class Tuned:
    """The best model that a search found, and what it measured on the way."""

    model: Model
    """A `Quantized` with its report, or the float graph."""
    recipe: dict[str, Any]
    """`bw.quantize(model, data, recipe=...)` builds the same model without a search."""
    pareto: list[dict[str, Any]]
    """Models that no other beats in both objective and score, and the float and int8 models."""
    layers: list[dict[str, Any]]
    """Per layer: its precision, the reason, and seconds and error of every precision."""
    objective: str
    budget_s: float
    max_drop: str
    metric: dict[str, Any]
    """Name of the score, and its value for the float model and for the best one."""
    seconds: float
    stopped: str
    """Why the search ended."""
    notes: list[str] = field(default_factory=list)

    @property
    def graph(self) -> Graph:
        return graph_of(self.model)

    @property
    def best(self) -> dict[str, Any]:
        """The row of the best model."""
        return next(row for row in self.pareto if row["is_best"])

    def save(self, path: str | Path, **options: Any) -> None:
        """Write the model (.onnx or .bw); the options are those of `bw.export_onnx`."""
        self.model.save(path, **options)

    def save_recipe(self, path: str | Path) -> None:
        """Write the recipe as JSON."""
        save_json(path, self.recipe)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        names = ("objective", "budget_s", "max_drop", "metric", "pareto", "layers", "recipe")
        found = {name: getattr(self, name) for name in names}
        return {**found, "seconds": self.seconds, "stopped": self.stopped, "notes": self.notes}

    def __repr__(self) -> str:
        return f"<tuned: {self.summary()}>"

    def summary(self) -> str:
        """The best model in one line."""
        best = self.best
        first = next((row for row in self.pareto if row["name"] == "float"), best)
        ratio = first["latency_ms"] / best["latency_ms"] if best["latency_ms"] else 1.0
        score = "not scored" if best["score"] is None else f"{best['score']:.6g}"
        return (
            f"{best['name']}: {best['latency_ms']:.4g} ms ({ratio:.2f} times float's speed), "
            f"{best['bytes'] / 1e6:.2f} MB, {self.metric['name']} {score} "
            f"(float {self.metric['float']:.6g}); {self.stopped} after {self.seconds:.0f} s"
        )

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        rows = Table("model", "ms", "MB", "score", "predicted error", "measured error", "")
        for row in self.pareto:
            rows.add_row(
                row["name"],
                f"{row['latency_ms']:.4g}",
                f"{row['bytes'] / 1e6:.2f}",
                "" if row["score"] is None else f"{row['score']:.6g}",
                *("" if e is None else f"{e:.2e}" for e in _errors(row)),
                "best" if row["is_best"] else "",
            )
        layers = Table("layer", "precision", "why")
        for layer in self.layers:
            layers.add_row(layer["layer"], layer["precision"], layer["reason"])
        text = io.StringIO()
        console = Console(file=text, width=140)
        notes = [f"note: {note}" for note in self.notes]
        console.print(layers, rows, self.summary(), *notes, sep="\n", highlight=False, markup=False)
        return text.getvalue()


def _errors(row: dict[str, Any]) -> tuple[float | None, float | None]:
    return row["predicted_error"], row["measured_error"]


def save_json(path: str | Path, value: Any) -> None:
    text = json.dumps(value, indent=2).encode()

    def write(file: IO[bytes]) -> None:
        file.write(text)

    write_atomically(path, write)
