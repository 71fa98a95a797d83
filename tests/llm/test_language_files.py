"""Language models from files: the compiled form in the cache folder, sessions, batches."""

import json
import os
import shutil

import numpy as np
import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("gguf", reason="the gguf package is not installed")
import tiny_models

from bitwright import knobs
from bitwright.compiler import CachedExecutable
from bitwright.errors import BitwrightError
from bitwright.frontend.language.source import read_source
from bitwright.llm.engine import compiled
from bitwright.llm.engine.engine import Sequence, Work
from bitwright.llm.files.save import save_model
from bitwright.llm.language_model import LanguageModel
from bitwright.llm.serve.models import open_model

TOKENS = [int(token) for token in tiny_models.tokens_of(30)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("model")
    tiny_models.save_decoder("llama", found)
    return found


@pytest.fixture(scope="module")
def path(folder, tmp_path_factory):
    found = tmp_path_factory.mktemp("file") / "tiny.gguf"
    save_model(read_source(folder), found)
    return found


def logits_of(lm):
    with lm.session() as session:
        return session.run(TOKENS, all_logits=True)


def test_a_warm_start_compiles_nothing(path, tmp_path, monkeypatch):
    monkeypatch.setenv(knobs.CACHE.name, str(tmp_path))
    cold = LanguageModel(path, threads=1, context=32)
    truth = logits_of(cold)
    with monkeypatch.context() as patch:
        patch.setattr(compiled, "compile", None)  # a call would fail
        warm = LanguageModel(path, threads=1, context=32)
        assert isinstance(warm.engine.decoder.executable, CachedExecutable)
        np.testing.assert_array_equal(logits_of(warm), truth)
        with pytest.raises(TypeError):
            LanguageModel(path, threads=1, context=40)
    other = LanguageModel(path, threads=2, context=40, slots=3)
    assert (other.context, other.engine.decoder.slots) == (40, 3)
    np.testing.assert_array_equal(logits_of(other), truth)


def test_a_warm_start_of_a_folder(folder, tmp_path, monkeypatch):
    monkeypatch.setenv(knobs.CACHE.name, str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    own, links = tmp_path / "own", tmp_path / "models--x" / "snapshots" / "1"
    shutil.copytree(folder, own)
    links.mkdir(parents=True)
    blobs = tmp_path / "models--x" / "blobs"
    shutil.copytree(folder, blobs)
    for file in blobs.iterdir():
        (links / file.name).symlink_to(file)
    cold = {path: logits_of(LanguageModel(path, threads=1, context=32)) for path in (own, links)}
    monkeypatch.setattr(compiled, "compile", None)  # a call would fail
    for path, truth in cold.items():
        lm = LanguageModel(path, threads=1, context=32)
        assert isinstance(lm.engine.decoder.executable, CachedExecutable)
        np.testing.assert_array_equal(logits_of(lm), truth)
    tiny_models.save_decoder("llama", own, changes={"attention_bias": True})
    with pytest.raises(TypeError):
        LanguageModel(own, threads=1, context=32)
    weights = links / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    (blobs / "other").write_bytes(data)
    weights.unlink()
    weights.symlink_to(blobs / "other")  # another revision
    with pytest.raises(TypeError):
        LanguageModel(links, threads=1, context=32)


def test_a_changed_shard_of_any_name(folder, tmp_path, monkeypatch):
    monkeypatch.setenv(knobs.CACHE.name, str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    own = tmp_path / "own"
    shutil.copytree(folder, own)
    shard = own / "model.safetensors"
    data = shard.read_bytes()
    names = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).keys() - {"__metadata__"}
    shard = shard.rename(own / "part-1")
    index = {"weight_map": dict.fromkeys(names, "part-1")}
    (own / "model.safetensors.index.json").write_text(json.dumps(index))
    cold = logits_of(LanguageModel(own, threads=1, context=32))
    (own / "new").write_bytes(data[:-64] + bytes(64))
    (own / "new").replace(shard)
    changed = logits_of(LanguageModel(own, threads=1, context=32))
    assert not np.array_equal(cold, changed)


def test_weights_that_change_while_they_are_compiled(folder, tmp_path, monkeypatch):
    monkeypatch.setenv(knobs.CACHE.name, str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    own = tmp_path / "own"
    shutil.copytree(folder, own)
    compile = compiled.compile

    def compile_slowly(*args, **options):
        executable = compile(*args, **options)
        os.utime(own / "model.safetensors", (0, 0))
        return executable

    monkeypatch.setattr(compiled, "compile", compile_slowly)
    lm = LanguageModel(own, threads=1, context=32)
    assert not isinstance(lm.engine.decoder.executable, CachedExecutable)


@pytest.mark.parametrize("cache", ["f16", "i8", "f32"])
def test_batches_and_moved_sequences(path, cache):
    """Sequences of a real graph, in any batch, moved out and back."""
    lm = LanguageModel(path, threads=2, context=32, slots=2, cache=cache)
    truth, sequences = logits_of(lm), [Sequence() for _ in range(4)]
    for _ in range(6):
        for pair in (sequences[:2], sequences[1:3], sequences[2:]):
            works = []
            for one in pair:
                start = len(one.tokens)
                works.append(Work(one, TOKENS[start : start + 3], 3))
            works = [work for work in works if work.tokens]
            if not works:
                continue
            for work, logits in zip(works, lm.engine.run(works), strict=True):
                end = len(work.sequence.tokens)
                np.testing.assert_array_equal(logits, truth[end - len(work.tokens) : end])


def test_a_saved_session(path, tmp_path):
    lm = LanguageModel(path, threads=1, context=32)
    truth = logits_of(lm)
    with lm.session() as session:
        session.run(TOKENS[:20])
        session.save(tmp_path / "talk")
    again = LanguageModel(path, threads=1, context=32, slots=2).load_session(tmp_path / "talk")
    np.testing.assert_array_equal(again.run(TOKENS[20:]), truth[-1])
    with pytest.raises(BitwrightError, match="another model, or to another cache format"):
        LanguageModel(path, threads=1, context=32, cache="i8").load_session(tmp_path / "talk")


def test_what_is_opened_for_serving(path, folder, tmp_path):
    assert isinstance(open_model(path, threads=1, context=16), LanguageModel)
    saved = tmp_path / "tiny.bw"
    save_model(read_source(folder), saved)
    assert isinstance(open_model(saved, threads=1, context=16), LanguageModel)


def test_a_model_without_a_tokenizer(folder):
    lm = LanguageModel(folder, threads=1, context=16)
    assert lm.session().run([3, 4]).shape == (tiny_models.VOCAB,)
    with pytest.raises(BitwrightError, match="has no tokenizer"):
        lm.tokenize("x")
