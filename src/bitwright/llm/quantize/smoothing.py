"""Scales channels between the layers of a transformer, so that weights round better (AWQ).

    x -> x / s,  W -> W * s        per channel, folded into what produces x

Norms absorb 1 / s in front of the queries, keys and values and of the gate and up matrices; the
rows of the up matrix absorb it in front of the down matrix. s = (mean square of x) ** (alpha / 2),
with the alpha of a short list that has the least output error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from bitwright.frontend.language.config import ModelConfig
from bitwright.frontend.language.stored import StoredTensor
from bitwright.llm.quantize.encoders import BlockEncoder
from bitwright.llm.quantize.gptq import output_error

Array = np.ndarray[Any, Any]
ALPHAS = (0.0, 0.15, 0.3, 0.45, 0.6)
ROWS = 256
"""Rows of a matrix that are tried."""


def smooth_layer(
    config: ModelConfig,
    tensors: Mapping[str, StoredTensor],
    moments: Mapping[str, Array],
    layer: int,
    encoders: Mapping[str, BlockEncoder],
) -> tuple[dict[str, StoredTensor], dict[str, Array]]:
    """The layer's tensors and moments with the scales that help."""
    name = f"blk.{layer}."
    groups = [
        (f"{name}attn_norm.weight", ["attn_q", "attn_k", "attn_v", "attn_qkv"]),
        (f"{name}ffn_norm.weight", ["ffn_gate", "ffn_up"]),
        (f"{name}ffn_up.weight", ["ffn_down"]),
    ]
    found, changed = dict(tensors), dict(moments)
    for producer, parts in groups:
        readers = [f"{name}{part}.weight" for part in parts if f"{name}{part}.weight" in found]
        if not readers or not _can_scale(found, producer, readers, changed, encoders, name):
            continue
        scale = best_scale([found[r].data for r in readers], changed[readers[0]], readers, encoders)
        if scale is None:
            continue
        found[producer] = _with(found[producer], _divided(found[producer].data, scale))
        bias = producer.replace(".weight", ".bias")
        if bias in found:
            found[bias] = _with(found[bias], found[bias].data / scale)
        for reader in readers:
            found[reader] = _with(found[reader], found[reader].data * scale)
            changed[reader] = changed[reader] / np.outer(scale, scale)
    return found, changed


def _can_scale(
    tensors: Mapping[str, StoredTensor],
    producer: str,
    readers: list[str],
    moments: Mapping[str, Array],
    encoders: Mapping[str, BlockEncoder],
    name: str,
) -> bool:
    """Whether only these matrices read what the producer makes, channel by channel."""
    if producer not in tensors or any(r not in moments or r not in encoders for r in readers):
        return False
    if producer.endswith("ffn_norm.weight"):
        return f"{name}ffn_gate_inp.weight" not in tensors  # a router and experts read it too
    if producer.endswith("ffn_up.weight"):
        return f"{name}ffn_gate.weight" in tensors and len(tensors[producer].shape) == 2
    return True


def best_scale(
    matrices: list[Array],
    moments: Array,
    names: list[str],
    encoders: Mapping[str, BlockEncoder],
) -> Array | None:
    """The scale of least output error, f32[channels]; None if none is better than 1."""
    size = np.sqrt(np.maximum(np.diagonal(moments), 1e-12)).astype(np.float64)
    best, least = None, np.inf
    for alpha in ALPHAS:
        scale = size**alpha
        scale = np.clip(scale / np.exp(np.log(scale).mean()), 1e-2, 1e2).astype(np.float32)
        importance = np.asarray(np.diagonal(moments) / scale.astype(np.float64) ** 2, np.float32)
        importance = importance / max(float(importance.mean()), 1e-30) + np.float32(1e-4)
        error = 0.0
        for matrix, name in zip(matrices, names, strict=True):
            w = matrix[:: max(len(matrix) // ROWS, 1)]
            encoder = encoders[name]
            values = encoder.dequantize(encoder.encode(w * scale, importance))
            error += output_error(w - values / scale, moments)
        if error < least * 0.999:
            best, least = (scale if alpha else None), error
    return best


def _divided(data: Array, scale: Array) -> Array:
    """A norm's scale, or the rows of a matrix, divided."""
    return data / (scale if data.ndim == 1 else scale[:, None])


def _with(tensor: StoredTensor, data: Array) -> StoredTensor:
    return StoredTensor(tensor.name, "F32", tensor.shape, np.asarray(data, np.float32))
