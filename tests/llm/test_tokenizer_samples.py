"""Samples of tokenizers: stored in the files that bitwright writes, checked when they are read."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

pytest.importorskip("tokenizers", reason="the tokenizers package is not installed")
pytest.importorskip("gguf", reason="the gguf package is not installed")
pytest.importorskip("torch", reason="torch is not installed")
import llm_models
from tiny_models import save_decoder

from bitwright.errors import ExportError, ImportModelError, RunError
from bitwright.frontend.language.source import TokenizerSource, read_source
from bitwright.llm.files.save import save_model
from bitwright.llm.text.samples import SAMPLES_FILE, SAMPLES_KEY, TEXTS
from bitwright.llm.text.source import read_tokenizer


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A model whose tokenizer is metadata of a GGUF file."""
    path = tmp_path_factory.mktemp("model")
    save_decoder("llama", path, changes={"vocab_size": 600})
    return replace(read_source(path), tokenizer=TokenizerSource(llm_models.metadata()))


def library_file(**changes):
    """The same tokenizer as a tokenizer.json."""
    model = llm_models.trained()
    added = [
        {"id": model["vocab"][name], "content": name, "special": name != "<think>"}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for name in llm_models.SPECIAL
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    parts = {"version": "1.0", "added_tokens": added, "model": model, "normalizer": None}
    level["use_regex"] = True
    parts |= {"pre_tokenizer": level, "decoder": level, "post_processor": None}
    return json.dumps(parts | changes)


@pytest.mark.parametrize("kind", ["metadata", "files"])
@pytest.mark.parametrize("suffix", [".bw", ".gguf"])
def test_files_have_samples(source, kind, suffix, tmp_path):
    if kind == "files":
        source = replace(
            source, tokenizer=TokenizerSource(files={"tokenizer.json": library_file()})
        )
    path = tmp_path / f"model{suffix}"
    save_model(source, path)
    stored = read_source(path).tokenizer
    text = stored.metadata.get(SAMPLES_KEY) or stored.texts()[SAMPLES_FILE]
    assert [row[0] for row in json.loads(text)] == list(TEXTS)
    tokenizer = read_tokenizer(stored.open())
    assert tokenizer.encode("a b") == read_tokenizer(llm_models.metadata()).encode("a b")
    save_model(read_source(path), tmp_path / f"again{suffix}")
    assert read_source(tmp_path / f"again{suffix}").tokenizer.texts() == stored.texts()


@pytest.mark.parametrize("kind", ["metadata", "files"])
def test_other_tokens_are_an_error(source, kind, tmp_path):
    if kind == "files":
        source = replace(
            source, tokenizer=TokenizerSource(files={"tokenizer.json": library_file()})
        )
    path = tmp_path / "model.bw"
    save_model(source, path)
    stored = read_source(path).tokenizer
    if kind == "metadata":
        changed = TokenizerSource({**stored.metadata, "tokenizer.ggml.pre": "llama-bpe"})
    else:
        other = library_file(normalizer={"type": "Lowercase"})
        changed = TokenizerSource(files={**stored.files, "tokenizer.json": other})
    with pytest.raises(ImportModelError, match=r"gives other tokens for .* than the file says"):
        read_tokenizer(changed.open())


@pytest.mark.parametrize(
    "samples",
    ["[[1, [2]]]", '[["x", ["y"]]]', '[["\\ud800", [1]]]', "{", 5, '"x"', "[" * 9000],
)
def test_damaged_samples(samples):
    with pytest.raises(ImportModelError, match="samples of the tokenizer are damaged"):
        read_tokenizer({**llm_models.metadata(), SAMPLES_KEY: samples})


def test_a_tokenizer_that_gguf_cannot_hold(source, tmp_path):
    files = {"tokenizer.json": library_file(normalizer={"type": "Lowercase"})}
    changed = replace(source, tokenizer=TokenizerSource(files=files))
    with pytest.raises(ExportError, match="a GGUF file cannot hold this tokenizer"):
        save_model(changed, tmp_path / "model.gguf")
    save_model(changed, tmp_path / "model.bw")


def test_a_tokenizer_without_tokens_for_some_texts(source, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"w0": 0, "w1": 1}))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    files = {"tokenizer.json": words.to_str()}
    save_model(replace(source, tokenizer=TokenizerSource(files=files)), tmp_path / "model.bw")
    stored = read_source(tmp_path / "model.bw").tokenizer
    tokenizer = read_tokenizer(stored.open())
    assert tokenizer.encode("w1 w0") == [1, 0]
    with pytest.raises(RunError, match="no tokens for the text"):
        tokenizer.encode("w2")
    changed = TokenizerSource(files={**stored.files, SAMPLES_FILE: '[["w2", [1]]]'})
    with pytest.raises(ImportModelError, match="a sample of the tokenizer fails"):
        read_tokenizer(changed.open())


def test_tokens_are_not_random(tmp_path):
    from tokenizers import Tokenizer, models

    merges = [("a", "b"), ("ab", "c")]
    words = {"a": 0, "b": 1, "ab": 2, "c": 3, "abc": 4}
    Tokenizer(models.BPE(words, merges, dropout=0.5)).save(str(tmp_path / "tokenizer.json"))
    tokenizer = read_tokenizer(tmp_path / "tokenizer.json")
    assert [tokenizer.encode("abc") for _ in range(50)] == [[4]] * 50
