"""The dimensions and switches of one language model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from bitwright.errors import ImportModelError


@dataclass(frozen=True)
class Rope:
    """Angles of rotary embeddings: position * frequency, one for each pair of features.

    `scale` multiplies cosines and sines. `beyond` (frequencies, scale) replaces both if the
    context is longer than `trained` positions.
    """

    frequencies: tuple[float, ...]
    theta: float = 10000.0
    scale: float = 1.0
    trained: int = 0
    beyond: tuple[tuple[float, ...], float] | None = None

    def at(self, context: int) -> tuple[tuple[float, ...], float]:
        """Frequencies and scale for a context of this length."""
        if self.beyond is not None and context > self.trained:
            return self.beyond
        return self.frequencies, self.scale


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: `used` of `count` for each token."""

    count: int
    used: int
    normalize: bool = True
    """Whether the weights of the used experts sum to one."""


@dataclass(frozen=True)
class ModelConfig:
    architecture: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    """The length that the model was trained for."""
    eps: float
    activation: str = "silu"
    ropes: tuple[Rope, ...] = ()
    rope_of_layer: tuple[int, ...] = ()
    """The rope of each layer; -1: no positions."""
    interleaved: bool = False
    """Whether pairs of rotated features are neighbours."""
    windows: tuple[int, ...] = ()
    """How many positions each layer sees, its own included; 0: all."""
    attention_scale: float = 0.0
    attention_softcap: float = 0.0
    final_softcap: float = 0.0
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    experts: Experts | None = None
    is_encoder: bool = False
    pooling: str = ""
    bos: int | None = None
    eos: tuple[int, ...] = ()
    name: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ModelConfig:
        """The configuration that `to_json` wrote."""
        try:
            data: dict[str, Any] = json.loads(text)
            data["ropes"] = tuple(_rope(row) for row in data["ropes"])
            for key in ("rope_of_layer", "windows", "eos"):
                data[key] = tuple(int(item) for item in data[key])
            if data["experts"] is not None:
                data["experts"] = Experts(**data["experts"])
            return cls(**{field.name: data[field.name] for field in fields(cls)})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ImportModelError(f"the configuration in the file is damaged: {error}") from None


def _rope(row: Mapping[str, Any]) -> Rope:
    beyond = row["beyond"]
    return Rope(
        tuple(row["frequencies"]),
        float(row["theta"]),
        float(row["scale"]),
        int(row["trained"]),
        None if beyond is None else (tuple(beyond[0]), float(beyond[1])),
    )
