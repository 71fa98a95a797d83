"""A real tokenizer against llama.cpp and transformers, on prose and code of several languages.

BITWRIGHT_TEST_GGUF names a GGUF file, SmolLM2-135M-Instruct for example.
"""

import os
import pathlib
import sysconfig

import pytest

pytest.importorskip("gguf", reason="the gguf package is not installed")
pytest.importorskip("tokenizers", reason="the tokenizers package is not installed")
import gguf
import llm_models

from bitwright.llm.text.gguf_tokenizer import tokenizer_of_metadata

PATH = os.environ.get("BITWRIGHT_TEST_GGUF", "")
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(not PATH, reason="BITWRIGHT_TEST_GGUF names no file"),
]


@pytest.fixture(scope="module")
def tokenizer():
    fields = gguf.GGUFReader(PATH).fields
    found = {n: f.contents() for n, f in fields.items() if n.startswith("tokenizer")}
    return tokenizer_of_metadata(found)


@pytest.fixture(scope="module")
def texts():
    library = pathlib.Path(sysconfig.get_paths()["stdlib"])
    code = [path.read_text(errors="replace") for path in sorted(library.glob("*.py"))[:60]]
    return [*llm_models.mixed_text(), *llm_models.documentation(), *code]


def test_llama_cpp(tokenizer, texts):
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    peer = llama_cpp.Llama(PATH, vocab_only=True, verbose=False)
    count = 0
    for text in texts:
        tokens = tokenizer.encode(text)
        assert tokens == peer.tokenize(text.encode(), add_bos=False, special=False)
        special = tokenizer.encode(text, special=True)
        assert special == peer.tokenize(text.encode(), add_bos=False, special=True)
        assert tokenizer.decode(tokens) == text
        count += len(tokens)
    assert count > 100_000


def test_transformers(tokenizer, texts):
    """transformers drops the step that cuts digits off, which the file names; it is added here."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from tokenizers import pre_tokenizers

    folder, name = os.path.split(PATH)
    peer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
    backend = peer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
    )
    backend.encode_special_tokens = True
    count = 0
    for text in texts:
        tokens = tokenizer.encode(text)
        assert tokens == backend.encode(text, add_special_tokens=False).ids
        count += len(tokens)
    assert count > 100_000
