"""The configuration of a model from the metadata of a GGUF file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from bitwright.errors import ImportModelError, UnsupportedError
from bitwright.frontend.gguf.reader import GgufFile
from bitwright.frontend.language.architectures import BY_GGUF, Architecture, find_architecture
from bitwright.frontend.language.config import Experts, ModelConfig, Rope
from bitwright.frontend.language.from_config import Settings, window_pattern
from bitwright.frontend.language.rope import divisors, make_rope
from bitwright.frontend.language.stored import StoredTensor

POOLING = {0: "none", 1: "mean", 2: "cls", 3: "last"}
_FROM_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def config_from_metadata(file: GgufFile) -> tuple[Architecture, ModelConfig]:
    """The architecture and the configuration of the model in a GGUF file."""
    where, kind = str(file.path), file.architecture
    found = find_architecture(kind, BY_GGUF, where)
    prefix = f"{kind}."
    own = {k[len(prefix) :]: v for k, v in file.metadata.items() if k.startswith(prefix)}
    s = Settings(own, where)
    layers, width = s.size("block_count"), s.size("embedding_length")
    heads = s.size("attention.head_count")
    kv_heads = s.size("attention.head_count_kv", default=heads)
    if heads % kv_heads:
        raise ImportModelError(
            "the heads do not divide into groups", where=where, found=f"{heads} and {kv_heads}"
        )
    head_dim = s.size("attention.key_length", default=max(width // heads, 1))
    if s.size("attention.value_length", default=head_dim) != head_dim:
        raise UnsupportedError("keys and values have different sizes", where=where)
    context = s.size("context_length")
    windows = _windows(found, s, layers)
    ropes, of_layer = _ropes(found, s, layers, windows, head_dim, context, file.tensors)
    tokens = Settings(file.metadata, where)
    bos = tokens.tokens("tokenizer.ggml.bos_token_id")
    eos = [
        *tokens.tokens("tokenizer.ggml.eos_token_id"),
        *tokens.tokens("tokenizer.ggml.eot_token_id"),
    ]
    norm = (
        "attention.layer_norm_epsilon" if found.is_encoder else "attention.layer_norm_rms_epsilon"
    )
    softcaps = found.softcaps
    return found, ModelConfig(
        architecture=found.name,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=_vocab(file, s),
        context=context,
        eps=s.number(norm, default=1e-6),
        activation=found.activation,
        ropes=ropes,
        rope_of_layer=of_layer,
        interleaved=found.interleaved_in_gguf,
        windows=windows,
        attention_scale=_attention_scale(found, s, width, heads, layers, head_dim),
        attention_softcap=s.number("attn_logit_softcapping", default=softcaps[0]),
        final_softcap=s.number("final_logit_softcapping", default=softcaps[1]),
        embedding_scale=math.sqrt(width) if found.scaled_embedding else 1.0,
        experts=_experts(found, s),
        is_encoder=found.is_encoder,
        pooling=POOLING.get(s.size("pooling_type", default=0, least=0), ""),
        bos=bos[0] if bos else None,
        eos=tuple(dict.fromkeys(eos)),
        name=str(file.metadata.get("general.name") or file.path.stem),
    )


def _vocab(file: GgufFile, s: Settings) -> int:
    table = file.tensors.get("token_embd.weight")
    return table.shape[0] if table is not None and table.shape else s.size("vocab_size")


def _attention_scale(
    found: Architecture, s: Settings, width: int, heads: int, layers: int, head_dim: int
) -> float:
    scale = s.number("attention.scale", default=0.0)
    if scale:
        return scale
    is_27b = (found.name, layers) in (("gemma2", 46), ("gemma3", 62))
    return float(1 / math.sqrt(width / heads if is_27b else head_dim))


def _windows(found: Architecture, s: Settings, layers: int) -> tuple[int, ...]:
    """Windows of gemma; llama.cpp gives the layers of other architectures none."""
    window = s.size("attention.sliding_window", default=0, least=0)
    if found.window_period < 2:
        return (0,) * layers
    pattern = s.data.get("attention.sliding_window_pattern")
    if isinstance(pattern, list) and len(pattern) == layers:
        return tuple(window if has else 0 for has in pattern)
    period = pattern if type(pattern) is int and pattern > 0 else found.window_period
    return window_pattern(window, period, layers)


def _ropes(
    found: Architecture,
    s: Settings,
    layers: int,
    windows: tuple[int, ...],
    head_dim: int,
    context: int,
    tensors: Mapping[str, StoredTensor],
) -> tuple[tuple[Rope, ...], tuple[int, ...]]:
    if found.is_encoder:
        return (), (-1,) * layers
    theta = s.number("rope.freq_base", default=10000.0)
    dim = s.size("rope.dimension_count", default=head_dim)
    scaling = _scaling(s, tensors, dim, context)
    ropes = [make_rope(theta, dim, scaling, context, f"{s.where}, rope")]
    if (freqs := tensors.get("rope_freqs.weight")) is not None:
        factors = divisors(_values(freqs), dim // 2, "rope_freqs.weight")
        frequencies = np.asarray(ropes[0].frequencies) / factors
        ropes = [Rope(tuple(frequencies.tolist()), theta, ropes[0].scale)]
    if found.local_theta:
        local = s.number("rope.freq_base_swa", default=found.local_theta)
        ropes.append(make_rope(local, dim, {}, context, f"{s.where}, rope"))
    of_layer = [1 if len(ropes) > 1 and window else 0 for window in windows]
    if found.no_rope_interval:
        last = found.no_rope_interval - 1
        of_layer = [-1 if i % found.no_rope_interval == last else r for i, r in enumerate(of_layer)]
    return tuple(ropes), tuple(of_layer)


def _scaling(
    s: Settings, tensors: Mapping[str, StoredTensor], dim: int, context: int
) -> dict[str, Any]:
    """The words of config.json for the scaling that the metadata describe."""
    kind = str(s.data.get("rope.scaling.type") or "none")
    original = s.data.get("rope.scaling.original_context_length")
    found: dict[str, Any] = {"rope_type": kind, "original_max_position_embeddings": original}
    if kind in ("linear", "yarn"):
        found["factor"] = s.number("rope.scaling.factor", default=1.0)
    long, short = (tensors.get(f"rope_factors_{k}.weight") for k in ("long", "short"))
    if long is not None and short is not None:
        found |= {
            "rope_type": "longrope",
            "long_factor": _values(long),
            "short_factor": _values(short),
            "attention_factor": s.number("rope.scaling.attn_factor", default=1.0),
        }
    return found


def _values(tensor: StoredTensor) -> Any:
    return tensor.data.reshape(-1).astype(np.float64) if tensor.is_plain else None


def _experts(found: Architecture, s: Settings) -> Experts | None:
    count = s.size("expert_count", default=0, least=0)
    if not count:
        return None
    used = s.size("expert_used_count")
    if used > count:
        raise ImportModelError(
            "more experts are used than there are", where=s.where, found=f"{used} of {count}"
        )
    return Experts(count, used, normalize=found.name != "qwen2_moe")


def is_used_by_config(name: str) -> bool:
    """Whether the configuration holds what this tensor says."""
    return name in _FROM_TENSORS
