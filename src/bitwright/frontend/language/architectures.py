"""The architectures of language models, one declaration each.

Tensors have the names of GGUF files everywhere; `names` gives what a Hugging Face folder calls
them where that differs from llama. A declaration holds only what the file does not say itself:
biases, norms of queries and keys, fused products and experts are used where their tensors exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bitwright.errors import UnsupportedError

LLAMA_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.{i}.attn_norm": "model.layers.{i}.input_layernorm",
    "blk.{i}.attn_q": "model.layers.{i}.self_attn.q_proj",
    "blk.{i}.attn_k": "model.layers.{i}.self_attn.k_proj",
    "blk.{i}.attn_v": "model.layers.{i}.self_attn.v_proj",
    "blk.{i}.attn_qkv": "model.layers.{i}.self_attn.qkv_proj",
    "blk.{i}.attn_q_norm": "model.layers.{i}.self_attn.q_norm",
    "blk.{i}.attn_k_norm": "model.layers.{i}.self_attn.k_norm",
    "blk.{i}.attn_output": "model.layers.{i}.self_attn.o_proj",
    "blk.{i}.ffn_norm": "model.layers.{i}.post_attention_layernorm",
    "blk.{i}.ffn_gate": "model.layers.{i}.mlp.gate_proj",
    "blk.{i}.ffn_up": "model.layers.{i}.mlp.up_proj",
    "blk.{i}.ffn_down": "model.layers.{i}.mlp.down_proj",
    "blk.{i}.ffn_gate_inp": "model.layers.{i}.mlp.gate",
    "blk.{i}.ffn_gate_exps": "model.layers.{i}.mlp.experts.{e}.gate_proj",
    "blk.{i}.ffn_up_exps": "model.layers.{i}.mlp.experts.{e}.up_proj",
    "blk.{i}.ffn_down_exps": "model.layers.{i}.mlp.experts.{e}.down_proj",
    "blk.{i}.ffn_gate_inp_shexp": "model.layers.{i}.mlp.shared_expert_gate",
    "blk.{i}.ffn_gate_shexp": "model.layers.{i}.mlp.shared_expert.gate_proj",
    "blk.{i}.ffn_up_shexp": "model.layers.{i}.mlp.shared_expert.up_proj",
    "blk.{i}.ffn_down_shexp": "model.layers.{i}.mlp.shared_expert.down_proj",
}
_GEMMA_NAMES = {
    "blk.{i}.ffn_norm": "model.layers.{i}.pre_feedforward_layernorm",
    "blk.{i}.post_attention_norm": "model.layers.{i}.post_attention_layernorm",
    "blk.{i}.post_ffw_norm": "model.layers.{i}.post_feedforward_layernorm",
}
_MIXTRAL_NAMES = {
    "blk.{i}.ffn_gate_inp": "model.layers.{i}.block_sparse_moe.gate",
    "blk.{i}.ffn_gate_exps": "model.layers.{i}.block_sparse_moe.experts.{e}.w1",
    "blk.{i}.ffn_up_exps": "model.layers.{i}.block_sparse_moe.experts.{e}.w3",
    "blk.{i}.ffn_down_exps": "model.layers.{i}.block_sparse_moe.experts.{e}.w2",
}
BERT_NAMES = {
    "token_embd": "embeddings.word_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
    "blk.{i}.attn_q": "encoder.layer.{i}.attention.self.query",
    "blk.{i}.attn_k": "encoder.layer.{i}.attention.self.key",
    "blk.{i}.attn_v": "encoder.layer.{i}.attention.self.value",
    "blk.{i}.attn_output": "encoder.layer.{i}.attention.output.dense",
    "blk.{i}.attn_output_norm": "encoder.layer.{i}.attention.output.LayerNorm",
    "blk.{i}.ffn_up": "encoder.layer.{i}.intermediate.dense",
    "blk.{i}.ffn_down": "encoder.layer.{i}.output.dense",
    "blk.{i}.layer_output_norm": "encoder.layer.{i}.output.LayerNorm",
}


@dataclass(frozen=True)
class Architecture:
    name: str
    model_types: tuple[str, ...]
    """`model_type` in config.json."""
    gguf: tuple[str, ...]
    """`general.architecture` in a GGUF file."""
    names: Mapping[str, str] = field(default_factory=dict)
    interleaved_in_gguf: bool = False
    """GGUF files of this kind hold queries and keys permuted for neighbouring pairs."""
    unit_offset: bool = False
    """Hugging Face folders store the scales of norms minus one; GGUF files do not."""
    scaled_embedding: bool = False
    """Embeddings are multiplied by sqrt(width)."""
    window_period: int = 0
    """Layers see a window, except each `window_period`-th; 1: all layers see it."""
    local_theta: float = 0.0
    """The rope of layers with a window, where the file does not say it."""
    no_rope_interval: int = 0
    """Each such layer has no positions, where the file does not say it."""
    activation: str = "silu"
    softcaps: tuple[float, float] = (0.0, 0.0)
    """Of attention and of logits, where the file does not say them."""
    is_encoder: bool = False

    def folder_names(self) -> dict[str, str]:
        """Templates of a Hugging Face folder by GGUF name."""
        return dict(BERT_NAMES) if self.is_encoder else {**LLAMA_NAMES, **self.names}


ARCHITECTURES = (
    Architecture("llama", ("llama", "smollm"), ("llama",), interleaved_in_gguf=True),
    Architecture("mistral", ("mistral",), ("mistral3",), interleaved_in_gguf=True, window_period=1),
    Architecture(
        "mixtral", ("mixtral",), (), _MIXTRAL_NAMES, interleaved_in_gguf=True, window_period=1
    ),
    Architecture("qwen2", ("qwen2",), ("qwen2",)),
    Architecture("qwen3", ("qwen3",), ("qwen3",)),
    Architecture("qwen2_moe", ("qwen2_moe",), ("qwen2moe",)),
    Architecture("qwen3_moe", ("qwen3_moe",), ("qwen3moe",)),
    Architecture(
        "smollm3", ("smollm3",), ("smollm3",), interleaved_in_gguf=True, no_rope_interval=4
    ),
    Architecture(
        "phi3",
        ("phi3",),
        ("phi3",),
        {"blk.{i}.ffn_up": "model.layers.{i}.mlp.gate_up_proj"},
        window_period=1,
    ),
    Architecture(
        "gemma2",
        ("gemma2",),
        ("gemma2",),
        _GEMMA_NAMES,
        unit_offset=True,
        scaled_embedding=True,
        window_period=2,
        activation="gelu_tanh",
        softcaps=(50.0, 30.0),
    ),
    Architecture(
        "gemma3",
        ("gemma3_text",),
        ("gemma3",),
        _GEMMA_NAMES,
        unit_offset=True,
        scaled_embedding=True,
        window_period=6,
        local_theta=10000.0,
        activation="gelu_tanh",
    ),
    Architecture("bert", ("bert",), ("bert",), is_encoder=True, activation="gelu"),
)
BY_MODEL_TYPE = {key: found for found in ARCHITECTURES for key in found.model_types}
BY_GGUF = {key: found for found in ARCHITECTURES for key in found.gguf}
BY_NAME = {found.name: found for found in ARCHITECTURES}


def find_architecture(key: str, table: Mapping[str, Architecture], where: str) -> Architecture:
    if key not in table:
        raise UnsupportedError(
            f"the architecture {key!r} is not known", where=where, expected=", ".join(sorted(table))
        )
    return table[key]
