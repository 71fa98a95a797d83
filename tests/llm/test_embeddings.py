"""Embeddings by decoders: against `transformers`, in batches, over the server."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("tokenizers", reason="the tokenizers package is not installed")
import torch
from tiny_models import VOCAB, save_decoder, tokens_of

import bitwright as bw
from bitwright.errors import BitwrightError, RunError
from bitwright.llm.embeddings import DecoderEmbedder, batches, open_embedder
from bitwright.llm.model import load_model

TEXTS = [tokens_of(n)[n // 3 :].tolist() for n in (5, 30, 2, 7, 11, 3, 19, 8, 40, 13)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with a tokenizer of words, which puts a token in front and one behind."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    path = tmp_path_factory.mktemp("model")
    theirs = save_decoder("qwen3", path)
    words = {f"w{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing("$A w2", special_tokens=[("w2", 2)])
    tokenizer.save(str(path / "tokenizer.json"))
    return path, theirs


def states_of(theirs, tokens):
    with torch.no_grad():
        found = theirs(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1]
    return found[0].numpy()


@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
def test_vectors_are_those_of_transformers(folder, pooling, monkeypatch):
    path, theirs = folder
    monkeypatch.setattr("bitwright.llm.embeddings.CHUNK", 16)  # long texts take several runs
    model = load_model(path, cache="f32", exact=True)
    embedder = DecoderEmbedder(model, 1, pooling, normalize=False)
    pool = {"last": lambda x: x[-1], "mean": lambda x: x.mean(0), "cls": lambda x: x[0]}[pooling]
    expected = np.stack([pool(states_of(theirs, tokens)) for tokens in TEXTS])
    found = embedder.embed_texts(TEXTS)
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max(), rtol=1e-3)
    alone = np.stack([embedder.embed([tokens])[0] for tokens in TEXTS])
    np.testing.assert_array_equal(found, alone)
    with pytest.raises(RunError, match="without tokens"):
        embedder.embed([[3], []])
    with pytest.raises(RunError, match="does not fit the context"):
        embedder.embed([[3] * 65])
    with pytest.raises(RunError, match=f"token {VOCAB} is not in"):
        embedder.embed_texts([[VOCAB]])


def test_texts_that_are_embedded_together():
    found = batches([512, 3, 600, 200, *[2] * 9, 310])
    assert sorted(n for batch in found for n in batch) == list(range(14))
    assert found[-2:] == [[0], [2]]
    assert [len(batch) for batch in found[:-2]] == [8, 3, 1]
    assert batches([]) == []


def test_work_can_be_ended_before_each_run(folder):
    embedder = DecoderEmbedder(load_model(folder[0], exact=True), 1)
    calls = []

    def check():
        calls.append(1)
        if len(calls) == 2:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        embedder.embed(TEXTS * 9, check)
    assert len(calls) == 2
    assert len(embedder.embed(TEXTS)) == len(TEXTS)


def test_a_language_model_embeds(folder, tmp_path):
    path, theirs = folder
    lm = bw.LanguageModel(path, threads=1, context=32, exact=True)
    (found,) = lm.embed(["w5 w6 w7"])
    state = states_of(theirs, [5, 6, 7, 2])[-1]
    np.testing.assert_allclose(found, state / np.linalg.norm(state), atol=2e-3)
    assert lm.embed([]).shape == (0, 32)
    with pytest.raises(BitwrightError, match="no pooling 'max'"):
        open_embedder(path, 1, pooling="max")


def test_the_pooling_that_files_name(folder, tmp_path):
    import shutil

    pytest.importorskip("gguf", reason="the gguf package is not installed")
    from bitwright.frontend.language.source import read_source
    from bitwright.llm.files.save import save_model

    shutil.copytree(folder[0], tmp_path / "m", ignore=shutil.ignore_patterns("tokenizer.json"))
    (tmp_path / "m" / "1_Pooling").mkdir()
    settings = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    (tmp_path / "m" / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    save_model(read_source(tmp_path / "m"), tmp_path / "m.gguf")
    save_model(read_source(tmp_path / "m"), tmp_path / "m.bw")
    for name in ("m", "m.gguf", "m.bw"):
        assert read_source(tmp_path / name).config.pooling == "mean"


def test_the_server_embeds_with_a_decoder(folder):
    for package in ("starlette", "uvicorn", "openai"):
        pytest.importorskip(package, reason=f"the {package} package is not installed")
    import openai
    from running_server import running

    lm = bw.LanguageModel(folder[0], threads=1, context=32)
    with running({"m": lm}) as (_, address):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="-", max_retries=0)
        found = client.embeddings.create(model="m", input=["w5 w6", "w9"])
        expected = lm.embed(["w5 w6", "w9"])
        vectors = np.array([one.embedding for one in found.data], np.float32)
        np.testing.assert_array_equal(vectors, expected)
        assert found.usage.prompt_tokens == 5
