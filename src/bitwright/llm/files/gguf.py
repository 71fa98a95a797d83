"""Writes a language model as a GGUF file, which llama.cpp reads.

A model that came from a GGUF file keeps its metadata. Otherwise the metadata are made from its
configuration and its tokenizer. Queries and keys are permuted where llama.cpp expects neighbouring
pairs; that moves whole rows, so quantized weights stay as they are.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bitwright.errors import ExportError
from bitwright.frontend.gguf.tensor_types import NUMBERS
from bitwright.frontend.language.architectures import BY_NAME, Architecture
from bitwright.frontend.language.config import ModelConfig
from bitwright.frontend.language.from_metadata import POOLING
from bitwright.frontend.language.rope import plain_frequencies
from bitwright.frontend.language.source import REPORT_KEY, ModelSource
from bitwright.frontend.language.stored import StoredTensor
from bitwright.llm.files.tokenizer_metadata import tokenizer_metadata
from bitwright.llm.text.library import need

Array = np.ndarray[Any, Any]
BLOCK = 32
_FILE_TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "BF16": 32, "I8": 7,
}  # fmt: skip
_GGUF_NAMES = {"mistral": "llama", "mixtral": "llama"}
_POOLING = {kind: number for number, kind in POOLING.items()}
_WITH_FREQUENCIES = ("llama", "smollm3")
"""Architectures for which llama.cpp reads divisors of frequencies."""


def write_gguf(source: ModelSource, path: str | Path) -> None:
    gguf = need("gguf")
    config = source.config
    architecture = BY_NAME[config.architecture]
    kind = _GGUF_NAMES.get(architecture.name) or architecture.gguf[0]
    pairs = list(_metadata(source, architecture, kind))
    tensors = _tensors(source, architecture)
    path = Path(path)
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
    except OSError as error:
        raise ExportError(f"cannot write {path}: {error.strerror or error}") from None
    try:
        writer = gguf.GGUFWriter(temporary, kind)
        for key, value, value_type in pairs:
            _add(gguf, writer, key, value, value_type)
        for tensor in tensors:
            raw = None if tensor.format in ("F32", "F16") else NUMBERS[tensor.format]
            data = np.ascontiguousarray(tensor.data)
            if tensor.format == "BF16":
                data = data.view(np.uint8).reshape(*data.shape[:-1], -1)
            type_ = None if raw is None else gguf.GGMLQuantizationType(raw)
            writer.add_tensor(tensor.name, data, raw_dtype=type_)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise ExportError(f"cannot write {path}: {error.strerror or error}") from None
        raise


def _add(gguf: Any, writer: Any, key: str, value: Any, value_type: str) -> None:
    types = gguf.GGUFValueType
    if isinstance(value, list):
        if value:  # an empty list has no type
            writer.add_key_value(key, value, types.ARRAY, types[value_type])
    else:
        writer.add_key_value(key, value, types[value_type])


def type_of(value: Any) -> str:
    """The name of the type that GGUF files use for a Python value, or for a list's items."""
    item = value[0] if isinstance(value, list) and value else value
    if isinstance(item, bool):
        return "BOOL"
    if isinstance(item, int):
        return "UINT32" if 0 <= item < 1 << 32 else "INT32" if abs(item) < 1 << 31 else "UINT64"
    return "FLOAT32" if isinstance(item, float) else "STRING"


def _metadata(
    source: ModelSource, architecture: Architecture, kind: str
) -> Iterator[tuple[str, Any, str]]:
    """Keys, values and their types."""
    formats = Counter(t.format for t in source.tensors.values() if len(t.shape) > 1)
    found: dict[str, Any] = {}
    if source.metadata:
        found = {k: v for k, v in source.metadata.items() if not k.startswith("split.")}
        found |= source.tokenizer.metadata
    else:
        found["general.name"] = source.config.name or source.path.stem
        found |= {f"{kind}.{k}": v for k, v in _dimensions(source, architecture).items()}
        found |= tokenizer_metadata(source.tokenizer, source.config)
    found["general.file_type"] = _FILE_TYPES.get(max(formats, key=lambda f: formats[f]), 0)
    found["general.quantization_version"] = 2
    if source.report:
        found[f"bitwright.{REPORT_KEY}"] = json.dumps(dict(source.report))
    for key, value in found.items():
        if key == "general.architecture":
            continue
        signed = key in ("tokenizer.ggml.token_type",)
        yield key, value, "INT32" if signed else type_of(value)


def _dimensions(source: ModelSource, architecture: Architecture) -> dict[str, Any]:
    c = source.config
    norm = "attention.layer_norm_epsilon" if c.is_encoder else "attention.layer_norm_rms_epsilon"
    found: dict[str, Any] = {
        "vocab_size": c.vocab,
        "context_length": c.context,
        "embedding_length": c.width,
        "block_count": c.layers,
        "feed_forward_length": _inner(source, "ffn_down") or _inner(source, "ffn_down_exps"),
        "attention.head_count": c.heads,
        "attention.head_count_kv": c.kv_heads,
        "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim,
        norm: c.eps,
    }
    if c.is_encoder:
        return found | {"attention.causal": False, "pooling_type": 2 if c.pooling == "cls" else 1}
    if c.pooling in _POOLING:
        found["pooling_type"] = _POOLING[c.pooling]
    found |= _rope_keys(c)
    windows = {window for window in c.windows if window}
    if len(windows) > 1:
        raise ExportError("a GGUF file holds one window size", found=sorted(windows))
    if windows and architecture.window_period > 1:
        found["attention.sliding_window"] = min(windows)
    elif windows and min(windows) < c.context:
        raise ExportError(
            "llama.cpp ignores the sliding window of this architecture",
            found=f"a window of {min(windows)} in a context of {c.context}",
            hint="Save the model as .bw.",
        )
    for key, value in (
        ("attn_logit_softcapping", c.attention_softcap),
        ("final_logit_softcapping", c.final_softcap),
    ):
        if value:
            found[key] = value
    if not math.isclose(c.attention_scale, c.head_dim**-0.5, rel_tol=1e-6):
        found["attention.scale"] = c.attention_scale
    if c.experts is not None:
        found |= {
            "expert_count": c.experts.count,
            "expert_used_count": c.experts.used,
            "expert_feed_forward_length": _inner(source, "ffn_down_exps"),
        }
        if shared := _inner(source, "ffn_down_shexp"):
            found["expert_shared_feed_forward_length"] = shared
        if not c.experts.normalize and architecture.name != "qwen2_moe":
            raise ExportError("llama.cpp normalizes the weights of experts; this model does not")
    return found


def _inner(source: ModelSource, part: str) -> int:
    tensor = source.tensors.get(f"blk.0.{part}.weight")
    return tensor.shape[-1] if tensor is not None else 0


def _rope_keys(c: ModelConfig) -> dict[str, Any]:
    if not c.ropes:
        return {}
    rope = c.ropes[0]
    found: dict[str, Any] = {
        "rope.freq_base": rope.theta,
        "rope.dimension_count": 2 * len(rope.frequencies),
    }
    if len(c.ropes) > 1:
        found["rope.freq_base_swa"] = c.ropes[1].theta
    divisors = rope_divisors(c)
    if rope.scale != 1 or rope.beyond is not None:
        raise ExportError(
            "these scaled rotary embeddings are not written to GGUF files",
            hint="Save the model as .bw.",
        )
    if np.ptp(divisors) < 1e-9:
        if divisors[0] != 1:
            found |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(divisors[0])}
    elif c.architecture not in _WITH_FREQUENCIES:
        raise ExportError(
            f"llama.cpp scales no frequencies of {c.architecture}", hint="Save the model as .bw."
        )
    return found


def rope_divisors(c: ModelConfig) -> Array:
    rope = c.ropes[0]
    plain = plain_frequencies(rope.theta, 2 * len(rope.frequencies))
    return np.asarray(plain / np.asarray(rope.frequencies))


def _tensors(source: ModelSource, architecture: Architecture) -> list[StoredTensor]:
    c = source.config
    permutes = architecture.interleaved_in_gguf and not c.interleaved
    found = []
    if c.ropes and not source.metadata and np.ptp(rope_divisors(c)) >= 1e-9:
        values = rope_divisors(c).astype(np.float32)
        found.append(StoredTensor("rope_freqs.weight", "F32", values.shape, values))
    for name, stored in source.tensors.items():
        tensor = _in_blocks(stored)
        if len(tensor.shape) == 1 and tensor.format != "F32":  # llama.cpp wants vectors in f32
            values = np.asarray(tensor.data, np.float32)
            tensor = StoredTensor(name, "F32", tensor.shape, values)
        heads = {"attn_q": c.heads, "attn_k": c.kv_heads}.get(name.split(".")[-2])
        found.append(_interleaved(tensor, heads) if permutes and heads else tensor)
    return found


def _in_blocks(tensor: StoredTensor) -> StoredTensor:
    """Rows of integers as Q8_0, whose blocks all get the scale of their row."""
    if tensor.scale is None:
        return tensor
    rows, columns = tensor.shape
    if columns % BLOCK:
        raise ExportError(
            f"{tensor.name!r} does not fit blocks of {BLOCK}",
            found=f"{columns} columns",
            hint="Save the model as .bw.",
        )
    blocks = np.empty((rows, columns // BLOCK, 2 + BLOCK), np.uint8)
    blocks[..., :2] = tensor.scale.astype("<f2")[:, None].view(np.uint8)[:, None]
    blocks[..., 2:] = tensor.data.view(np.uint8).reshape(rows, -1, BLOCK)
    return StoredTensor(tensor.name, "Q8_0", tensor.shape, blocks.reshape(rows, -1))


def _interleaved(tensor: StoredTensor, heads: int) -> StoredTensor:
    """Rows of each head from halves (i, i + n/2) to neighbouring pairs."""
    data = tensor.data
    half = data.shape[0] // heads // 2
    moved = data.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(data.shape)
    return StoredTensor(tensor.name, tensor.format, tensor.shape, moved)
