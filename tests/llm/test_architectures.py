"""Every architecture against `transformers`, with random weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tiny_models import (
    DECODERS,
    feeds,
    greedy,
    randomize,
    reference_logits,
    save_decoder,
    tokens_of,
)

import bitwright as bw
from bitwright.errors import BitwrightError, UnsupportedError
from bitwright.llm.model import load_encoder, load_model

COMPILED = ("llama", "gemma2", "qwen3_moe")
"""The others run in the interpreter: their kernels are the same, and compiling takes seconds."""


def runner(exe: Any, slot: int = 0) -> Any:
    """Logits of tokens behind what a slot holds."""
    return lambda tokens, start: exe.run(feeds(tokens, start, slot))["logits"]


@pytest.mark.parametrize("key", DECODERS)
def test_decoder_equals_transformers(key, tmp_path):
    theirs = save_decoder(key, tmp_path)
    model = load_model(tmp_path, context=32, cache="f32", slots=2, exact=True)
    exe = bw.compile(model.graph, target="cpu" if key in COMPILED else "reference")
    tokens = tokens_of(12)
    expected = reference_logits(theirs, tokens)
    tolerance = {"atol": 2e-5 * np.abs(expected).max(), "rtol": 1e-4}
    found = runner(exe)(tokens, 0)
    np.testing.assert_allclose(found, expected, **tolerance)
    parts = [runner(exe, 1)(tokens[:7], 0)]  # the other slot: prefill, then one by one
    parts += [runner(exe, 1)(tokens[i : i + 1], i) for i in range(7, 12)]
    np.testing.assert_array_equal(np.concatenate(parts), found)
    reference = lambda prompt, start: reference_logits(
        theirs, np.array(greedy_input(prompt, start))
    )
    seen: list[int] = []

    def greedy_input(prompt: np.ndarray, start: int) -> list[int]:
        seen[start:] = prompt.tolist()
        return seen

    assert greedy(runner(exe), tokens[:5], 8) == greedy(reference, tokens[:5], 8)


def test_only_wanted_rows_are_computed(tmp_path):
    save_decoder("llama", tmp_path)
    exe = bw.compile(load_model(tmp_path, cache="f32").graph, target="reference")
    tokens = tokens_of(6)
    full = exe.run(feeds(tokens))["logits"]
    exe.reset()
    some = exe.run({**feeds(tokens), "rows": np.array([5, 2], np.int32)})["logits"]
    np.testing.assert_array_equal(some, full[[5, 2]])


def test_sequences_of_different_lengths_run_together(tmp_path):
    save_decoder("qwen2", tmp_path)
    model = load_model(tmp_path, cache="f32", slots=3)
    alone, exe = (bw.compile(model.graph, target="reference") for _ in range(2))
    lengths = (3, 7, 5)
    texts = [tokens_of(9)[i:][:length] for i, length in enumerate(lengths)]
    expected = [runner(alone, slot)(text, 0) for slot, text in enumerate(texts)]
    parts = [feeds(text, slot=slot) for slot, text in enumerate(texts)]
    batch = {key: np.concatenate([p[key] for p in parts]) for key in ("tokens", "slot", "position")}
    found = exe.run({**batch, "rows": np.arange(15, dtype=np.int32)})["logits"]
    np.testing.assert_array_equal(found, np.concatenate(expected))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_folders_of_several_files(dtype, tmp_path):
    theirs = save_decoder("llama", tmp_path, dtype, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model = load_model(tmp_path, cache="f32", exact=True)
    formats = {tensor.format for tensor in model.source.tensors.values()}
    assert formats == {"BF16" if dtype == "bfloat16" else "F16"}
    tokens = tokens_of(9)
    whole = type(theirs).from_pretrained(tmp_path, dtype="float32").eval()  # angles are too
    expected = reference_logits(whole, tokens)
    found = runner(bw.compile(model.graph, target="reference"))(tokens, 0)
    np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max(), rtol=1e-4)


def test_encoder_equals_transformers(tmp_path):
    transformers, torch = (pytest.importorskip(name) for name in ("transformers", "torch"))
    torch.manual_seed(0)
    theirs = transformers.BertModel(
        transformers.BertConfig(
            vocab_size=97,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=32,
        )
    ).eval()
    randomize(theirs)
    theirs.save_pretrained(tmp_path)
    model = load_encoder(tmp_path)
    tokens = np.stack([tokens_of(9), tokens_of(9)[::-1]])
    mask = np.array([[1] * 9, [1] * 5 + [0] * 4], np.int32)
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens), torch.tensor(mask)).last_hidden_state.numpy()
    found = bw.compile(model.graph, target="reference").run({"tokens": tokens, "mask": mask})
    np.testing.assert_allclose(found["hidden"][0], expected[0], atol=2e-5, rtol=1e-4)
    np.testing.assert_allclose(found["hidden"][1, :5], expected[1, :5], atol=2e-5, rtol=1e-4)
    mean = expected[1, :5].mean(0)
    np.testing.assert_allclose(
        found["embedding"][1], mean / np.linalg.norm(mean), atol=2e-5, rtol=1e-4
    )
    with pytest.raises(BitwrightError, match="encoder"):
        load_model(tmp_path)


def test_long_contexts_have_their_own_frequencies(tmp_path):
    theirs = save_decoder("phi3-long", tmp_path)
    exe = bw.compile(load_model(tmp_path, cache="f32").graph, target="reference")
    tokens = tokens_of(40)
    expected = reference_logits(theirs, tokens)
    np.testing.assert_allclose(runner(exe)(tokens, 0), expected, atol=1e-4, rtol=1e-4)


def test_a_model_with_unknown_tensors_is_refused(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    save_decoder("llama", tmp_path)
    arrays = safetensors.load_file(tmp_path / "model.safetensors")
    arrays["model.layers.0.self_attn.gate.weight"] = np.zeros((4, 4), np.float32)
    safetensors.save_file(arrays, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedError, match=r"no tensor 'model\.layers\.0\.self_attn\.gate"):
        load_model(tmp_path)


def test_load_gives_the_graph_of_a_folder(tmp_path):
    save_decoder("llama", tmp_path)
    graph = bw.load(tmp_path)
    assert [value.name for value in graph.inputs] == ["tokens", "slot", "position", "rows"]
    assert {value.name for value in graph.states} == {"k.0", "v.0", "k.1", "v.1"}
    assert graph.states[0].shape == (1, 2, 64, 8)
