"""The configuration of a model from the `config.json` of a Hugging Face folder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from bitwright.errors import ImportModelError, UnsupportedError
from bitwright.frontend.language.architectures import (
    BY_MODEL_TYPE,
    Architecture,
    find_architecture,
)
from bitwright.frontend.language.config import Experts, ModelConfig, Rope
from bitwright.frontend.language.rope import make_rope

MAX_SIZE = 1 << 24
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
}


class Settings:
    """Typed reading of the settings of a model, with errors that name the setting."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data, self.where = data, where

    def size(self, *keys: str, default: int | None = None, least: int = 1) -> int:
        """A whole number under the first of these keys that is there."""
        value = self._find(keys, default)
        if type(value) is not int or not least <= value <= MAX_SIZE:
            raise ImportModelError(
                f"the setting {keys[0]!r} is not a size",
                where=self.where,
                expected=f"a whole number of {least} to {MAX_SIZE}",
                found="nothing" if value is None else repr(value),
            )
        return value

    def number(self, *keys: str, default: float | None = None) -> float:
        value = self._find(keys, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not math.isfinite(value)
        ):
            raise ImportModelError(
                f"the setting {keys[0]!r} is not a number", where=self.where, found=repr(value)
            )
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.data.get(key)
        return default if value is None else bool(value)

    def words(self, key: str, allowed: tuple[Any, ...], count: int) -> list[Any] | None:
        """A list with one of the allowed items for each layer; None if it is absent."""
        value = self.data.get(key)
        if value is None:
            return None
        if (
            not isinstance(value, list)
            or len(value) != count
            or any(item not in allowed for item in value)
        ):
            raise ImportModelError(
                f"the setting {key!r} does not fit the model",
                where=self.where,
                expected=f"{count} of {', '.join(map(str, allowed))}",
                found=str(value)[:80],
            )
        return value

    def tokens(self, key: str) -> tuple[int, ...]:
        """Token numbers: one, or a list of them."""
        value = self.data.get(key)
        items = value if isinstance(value, list) else [value]
        return tuple(item for item in items if type(item) is int and item >= 0)

    def _find(self, keys: tuple[str, ...], default: Any) -> Any:
        for key in keys:
            if self.data.get(key) is not None:
                return self.data[key]
        return default


def config_from_json(data: Mapping[str, Any], where: str) -> tuple[Architecture, ModelConfig]:
    """The architecture and the configuration of the model that config.json describes."""
    if isinstance(data.get("text_config"), dict):
        raise UnsupportedError(
            "a model of text and images is not supported", where=where, hint="Save its text model."
        )
    found = find_architecture(str(data.get("model_type")), BY_MODEL_TYPE, where)
    s = Settings(data, where)
    layers, width = s.size("num_hidden_layers"), s.size("hidden_size")
    heads = s.size("num_attention_heads")
    head_dim = s.size("head_dim", default=max(width // heads, 1))
    kv_heads = s.size("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ImportModelError(
            "the heads do not divide into groups", where=where, found=f"{heads} and {kv_heads}"
        )
    context = s.size("max_position_embeddings")
    windows = _windows(found, s, layers)
    ropes, of_layer = _ropes(found, s, layers, windows, head_dim, context)
    bos = s.tokens("bos_token_id")
    eps = s.number("layer_norm_eps" if found.is_encoder else "rms_norm_eps", default=1e-6)
    return found, ModelConfig(
        architecture=found.name,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=s.size("vocab_size"),
        context=context,
        eps=eps,
        activation=_activation(found, s),
        ropes=ropes,
        rope_of_layer=of_layer,
        windows=windows,
        attention_scale=_attention_scale(s, head_dim),
        attention_softcap=s.number("attn_logit_softcapping", default=0.0),
        final_softcap=s.number("final_logit_softcapping", default=0.0),
        embedding_scale=math.sqrt(width) if found.scaled_embedding else 1.0,
        experts=_experts(found, s),
        is_encoder=found.is_encoder,
        bos=bos[0] if bos else None,
        eos=s.tokens("eos_token_id"),
        name=str(data.get("_name_or_path") or ""),
    )


def _activation(found: Architecture, s: Settings) -> str:
    name = str(s.data.get("hidden_activation") or s.data.get("hidden_act") or found.activation)
    if name not in ACTIVATIONS:
        if name == found.activation:
            return found.activation
        raise UnsupportedError(
            f"the activation {name!r} is not supported",
            where=s.where,
            expected=", ".join(ACTIVATIONS),
        )
    return ACTIVATIONS[name]


def _attention_scale(s: Settings, head_dim: int) -> float:
    scalar = s.number("query_pre_attn_scalar", default=float(head_dim))
    if scalar <= 0:
        raise ImportModelError("'query_pre_attn_scalar' is not positive", where=s.where)
    return float(1 / math.sqrt(scalar))


def _windows(found: Architecture, s: Settings, layers: int) -> tuple[int, ...]:
    window = s.size("sliding_window", default=0, least=0)
    if not window or not s.flag("use_sliding_window", default=True):
        return (0,) * layers
    kinds = s.words("layer_types", ("sliding_attention", "full_attention"), layers)
    if kinds is not None:
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    if "max_window_layers" in s.data:
        first = s.size("max_window_layers", least=0)
        return tuple(window if layer >= first else 0 for layer in range(layers))
    period = s.size("sliding_window_pattern", default=found.window_period, least=0)
    return window_pattern(window, period, layers)


def window_pattern(window: int, period: int, layers: int) -> tuple[int, ...]:
    """A window in all layers except each `period`-th; period 1: in all, 0: in none."""
    if period <= 1:
        return (window * period,) * layers
    return tuple(window if (layer + 1) % period else 0 for layer in range(layers))


def _ropes(
    found: Architecture,
    s: Settings,
    layers: int,
    windows: tuple[int, ...],
    head_dim: int,
    context: int,
) -> tuple[tuple[Rope, ...], tuple[int, ...]]:
    """Ropes, and the number of each layer's: rope 1 is that of layers with a window."""
    if found.is_encoder:
        return (), (-1,) * layers
    theta = s.number("rope_theta", default=10000.0)
    new, old = s.data.get("rope_parameters"), s.data.get("rope_scaling")
    rows = new if isinstance(new, dict) else {}
    if isinstance(old, dict) and not rows:
        rows = old
    by_kind = {k: rows[k] for k in ("full_attention", "sliding_attention") if k in rows}
    full = by_kind.get("full_attention", {} if by_kind else rows)
    if not all(isinstance(row, dict) for row in (full, *by_kind.values())):
        raise ImportModelError("'rope_parameters' is damaged", where=s.where)
    ropes = [_rope(full, theta, s, head_dim, context)]
    local = by_kind.get("sliding_attention")
    if local is not None or found.local_theta:
        default = s.number("rope_local_base_freq", default=found.local_theta or theta)
        ropes.append(_rope(local or {}, default, s, head_dim, context))
    of_layer = [1 if len(ropes) > 1 and window else 0 for window in windows]
    if found.no_rope_interval:
        listed = s.words("no_rope_layers", (0, 1), layers)
        interval = s.size("no_rope_layer_interval", default=found.no_rope_interval)
        uses = listed or [int((layer + 1) % interval != 0) for layer in range(layers)]
        of_layer = [rope if use else -1 for rope, use in zip(of_layer, uses, strict=True)]
    return tuple(ropes), tuple(of_layer)


def _rope(row: Mapping[str, Any], theta: float, s: Settings, head_dim: int, context: int) -> Rope:
    own = Settings(row, f"{s.where}, rope")
    fraction = own.number(
        "partial_rotary_factor", default=s.number("partial_rotary_factor", default=1.0)
    )
    original = s.data.get("original_max_position_embeddings")
    scaling = {"original_max_position_embeddings": original, **row}
    return make_rope(
        own.number("rope_theta", default=theta),
        int(head_dim * fraction),
        scaling,
        context,
        own.where,
    )


def _experts(found: Architecture, s: Settings) -> Experts | None:
    if not any(key in s.data for key in ("num_local_experts", "num_experts")):
        return None
    count = s.size("num_local_experts", "num_experts")
    used = s.size("num_experts_per_tok")
    if used > count:
        raise ImportModelError(
            "more experts are used than there are", where=s.where, found=f"{used} of {count}"
        )
    normalize = found.name == "mixtral" or s.flag("norm_topk_prob")
    return Experts(count, used, normalize)
