"""Quantization of language models: formats, budgets, calibration, files, perplexity."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner
from tiny_models import VOCAB, save_decoder, tokens_of

import bitwright as bw
from bitwright.cli import main
from bitwright.errors import BitwrightError
from bitwright.frontend.language.source import read_source
from bitwright.llm.model import DecoderModel, load_model
from bitwright.llm.perplexity import perplexity
from bitwright.llm.quantize.encoders import ENCODERS
from bitwright.llm.quantize.gptq import gptq_blocks, output_error
from bitwright.llm.text.source import read_tokenizer
from bitwright.ops.quant.block_formats import FORMATS


@pytest.mark.parametrize("kind", [kind for kind in ENCODERS if kind in FORMATS])
def test_encoders_are_no_worse_than_those_of_the_package(kind):
    quants = pytest.importorskip("gguf.quants")
    w = np.random.default_rng(0).standard_normal((16, 128)).astype(np.float32)
    w[3] = 0
    w[4, :32] = 2.5
    found = FORMATS[kind].dequantize(ENCODERS[kind].encode(w))
    type_ = pytest.importorskip("gguf").GGMLQuantizationType[kind]
    theirs = quants.dequantize(quants.quantize(w, type_), type_)
    assert np.square(found - w).sum() < np.square(theirs - w).sum()
    assert not found[3].any()
    np.testing.assert_allclose(found[4, :32], 2.5, rtol=5e-3)


def test_gptq_lowers_the_error_of_outputs():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((400, 24)) @ rng.standard_normal((24, 96)) + 0.1 * rng.standard_normal(
        (400, 96)
    )
    w = rng.standard_normal((32, 96)).astype(np.float32)
    moments = x.T @ x / len(x)
    encoder = ENCODERS["Q4_0"]
    errors = [
        output_error(w - FORMATS["Q4_0"].dequantize(blocks), moments)
        for blocks in (encoder.encode(w), gptq_blocks(w, moments, encoder))
    ]
    assert errors[1] < 0.5 * errors[0]
    nothing = np.zeros_like(moments)
    np.testing.assert_array_equal(gptq_blocks(w, nothing, encoder), encoder.encode(w))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    save_decoder("llama-tied", path)
    return path


def formats(path):
    return {name: tensor.format for name, tensor in read_source(path).tensors.items()}


def test_widths_by_pattern_and_files(folder, tmp_path):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (4, 32))
    result: object = bw.quantize(folder, tokens, "w4", widths={"*.ffn_down*": "Q5_0", "k_proj": 8})
    for suffix in (".bw", ".gguf"):
        result.save(tmp_path / f"m{suffix}")
        found = formats(tmp_path / f"m{suffix}")
        assert found["token_embd.weight"] == "Q8_0"  # tied to the head
        assert found["blk.0.ffn_down.weight"] == "Q5_0"
        assert found["blk.1.attn_k.weight"] == "Q8_0"
        assert found["blk.1.attn_q.weight"] == "Q4_1"
        assert found["blk.0.attn_norm.weight"] == "F32"
    sizes = [(tmp_path / f"m{suffix}").stat().st_size for suffix in (".bw", ".gguf")]
    assert sizes[0] < 1.05 * sizes[1] + 30000  # the graph's text counts in a tiny model
    text = tokens_of(20)
    values = [
        perplexity(load_model(path, cache="f32", exact=True), text, threads=1).value
        for path in (folder, tmp_path / "m.bw", tmp_path / "m.gguf")
    ]
    assert values[1] == pytest.approx(values[2], rel=1e-4)
    assert values[1] == pytest.approx(values[0], rel=0.5)
    errors = {m.name: m.error for m in result.matrices}
    assert 0 < errors["blk.1.attn_k.weight"] < errors["blk.1.attn_q.weight"] < 0.3


def test_a_size_budget_widens_what_gains_most(folder):
    smallest = bw.quantize(folder, None, "w4", widths={"*": 4, "lm_head": 4}).nbytes
    budget = int(1.3 * smallest)
    result = bw.quantize(folder, tokens_of(64), "w4", size_budget=budget)
    kinds = {m.name: m.format for m in result.matrices}
    assert smallest < result.nbytes <= budget
    assert len(set(kinds.values())) > 1
    with pytest.raises(BitwrightError, match="the size budget is too small"):
        bw.quantize(folder, None, "w4", size_budget="1kB")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"recipe": "w3"}, "no recipe for language models is named 'w3'"),
        ({"widths": {"nothing": 4}}, "matches no matrix"),
        ({"widths": {"*": 3}}, "no format has the width 3"),
        ({"size_budget": "much"}, "is no size"),
        ({"data": np.full((1, 4), VOCAB)}, "outside the vocabulary"),
        ({"data": "text"}, "no tokenizer"),
        ({"subset": 3}, "not for language models"),
    ],
)
def test_wrong_options_are_refused(folder, options, message):
    with pytest.raises(BitwrightError, match=message):
        bw.quantize(folder, **options)


def test_perplexity_is_that_of_the_logits(folder):
    model = load_model(folder, cache="f32", exact=True)
    tokens = tokens_of(11)
    found = perplexity(model, tokens, window=8, threads=1)
    graph, total = model.graph_for(context=8), 0.0
    for part in (tokens[:8], tokens[8:]):
        rows = np.arange(len(part), dtype=np.int32)
        run = bw.compile(graph, target="reference").run
        y = run({"tokens": part, "slot": rows * 0, "position": rows, "rows": rows})["logits"]
        p = np.exp(y.astype(np.float64))
        p /= p.sum(1, keepdims=True)
        total -= np.log(p[rows[:-1], part[1:]]).sum()
    assert found.tokens == 9
    assert found.value == pytest.approx(np.exp(total / 9), rel=1e-5)
    assert isinstance(model, DecoderModel)


def test_commands(folder, tmp_path):
    output = str(tmp_path / "m.gguf")
    run = CliRunner().invoke(
        main, ["quantize", str(folder), "-o", output, "--recipe", "w8", "--json"]
    )
    assert run.exit_code == 0, run.output
    assert {row["format"] for row in json.loads(run.output)["matrices"]} == {"Q8_0"}
    text = tmp_path / "text.txt"
    text.write_text("any text")
    run = CliRunner().invoke(main, ["perplexity", output, "--text", str(text)])
    assert run.exit_code == 2  # the tiny model has no tokenizer
    run = CliRunner().invoke(main, ["quantize", str(folder), "-o", str(tmp_path / "m.pt")])
    assert run.exit_code == 2
    run = CliRunner().invoke(main, ["quantize", output, "-o", output])
    assert run.exit_code == 2


def test_tokenizers_go_along(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    text = "Saved models keep their tokenizer: 12 words, ünïcode and\n  spaces. "
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([text * 3], trainer)
    save_decoder("llama-tied", tmp_path / "hf", changes={"vocab_size": 320})
    made.save(str(tmp_path / "hf" / "tokenizer.json"))
    result = bw.quantize(tmp_path / "hf", text * 9, "w8")
    expected = made.encode(text).ids
    for suffix in (".bw", ".gguf"):
        result.save(tmp_path / f"m{suffix}")
        model = load_model(tmp_path / f"m{suffix}")
        assert read_tokenizer(model.tokenizer_source).encode(text) == expected
    (tmp_path / "text.txt").write_text(text * 3, encoding="utf-8")
    options = ["perplexity", str(tmp_path / "m.gguf"), "--text", str(tmp_path / "text.txt")]
    run = CliRunner().invoke(main, [*options, "--store", "--tokens", "40", "--json"])
    assert run.exit_code == 0, run.output
    rows = json.loads(run.output)["perplexity"]
    assert [row["exact"] for row in rows] == [True, False]
    assert load_model(tmp_path / "m.gguf").report["perplexity"] == rows
