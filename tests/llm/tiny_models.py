"""Tiny language models with random weights, written by `transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

VOCAB, CONTEXT = 97, 64
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 3.0],
}
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True, "attention_bias": True}),
    "llama-llama3": ("Llama", {"rope_parameters": _LLAMA3}),
    "llama-yarn": ("Llama", {"rope_parameters": _YARN}),
    "llama-linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "mistral": ("Mistral", {"sliding_window": 5, "head_dim": 16}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen2_moe": (
        "Qwen2Moe",
        {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {**_EXPERTS, "num_experts": 4, "norm_topk_prob": True, "head_dim": 8},
    ),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4}),
    "phi3": ("Phi3", {"sliding_window": 6}),
    "phi3-long": ("Phi3", {"rope_parameters": _LONG, "original_max_position_embeddings": 32}),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 4}),
    "gemma3": ("Gemma3", {"head_dim": 16, "sliding_window": 4, "num_hidden_layers": 7}),
}


def save_decoder(
    key: str,
    folder: Path,
    dtype: str = "float32",
    changes: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """The model of `transformers` of a declaration, saved in a folder."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    kind, own = DECODERS[key]
    text = "Text" if kind == "Gemma3" else ""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}{text}Config")(**{**_SIZES, **own, **(changes or {})})
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    randomize(model)
    model = model.to(getattr(torch, dtype)).eval()
    model.config._attn_implementation = "eager"
    model.save_pretrained(folder, **options)
    return model


def randomize(model: Any) -> None:
    """Larger weights than the initial ones, so that errors show; norms differ from 1."""
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(0.2 * noise + ("norm" in name.lower() and "bias" not in name))


def tokens_of(count: int) -> np.ndarray:
    return (np.arange(3, 3 + count, dtype=np.int32) * 29) % VOCAB


def feeds(tokens: np.ndarray, start: int = 0, slot: int = 0) -> dict[str, np.ndarray]:
    """One sequence's rows, all of whose logits are wanted."""
    rows = np.arange(len(tokens), dtype=np.int32)
    return {
        "tokens": tokens.astype(np.int32),
        "slot": np.full(len(tokens), slot, np.int32),
        "position": rows + np.int32(start),
        "rows": rows,
    }


def reference_logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        found = model(torch.tensor(tokens[None].astype(np.int64))).logits[0].float().numpy()
    return np.asarray(found)


def greedy(run: Any, prompt: np.ndarray, count: int) -> list[int]:
    """Greedy tokens behind a prompt by `run(tokens, start) -> logits`."""
    logits, start, found = run(prompt, 0), len(prompt), []
    for _ in range(count):
        found.append(int(np.argmax(logits[-1])))
        logits, start = run(np.array(found[-1:], np.int32), start), start + 1
    return found
