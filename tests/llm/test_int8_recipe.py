"""The recipe int8: rows of integers with one scale, products of integers, files."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("torch", reason="torch is not installed")
import tiny_models
from tiny_models import CONTEXT, VOCAB, feeds, save_decoder, tokens_of

import bitwright as bw
from bitwright.errors import BitwrightError, ExportError
from bitwright.frontend.language.decoder import CacheShape
from bitwright.frontend.language.source import read_source
from bitwright.frontend.language.weights import dequantized
from bitwright.llm.files.save import save_model
from bitwright.llm.model import DecoderModel
from bitwright.llm.quantize.encoders import ENCODERS
from bitwright.llm.quantize.run import quantize_model


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_decoder("llama-tied", path, changes={"intermediate_size": 50})
    return bw.quantize(path, None, "int8")


def graph_of(source, exact=False):
    return DecoderModel(source, CacheShape(1, CONTEXT, "f32"), exact).graph


def test_rows_have_one_scale():
    w = np.random.default_rng(0).standard_normal((9, 50)).astype(np.float32)
    w[3], w[4] = 0, -np.abs(w[4])
    encoder = ENCODERS["I8"]
    found = encoder.dequantize(encoder.encode(w))
    step = np.abs(w).max(1) / 127
    assert (np.abs(found - w) <= 0.75 * step[:, None] + 1e-7).all()
    assert not found[3].any()


def test_products_are_of_integers(quantized):
    source = quantized.source
    kinds = {tensor.format for tensor in source.tensors.values()}
    assert kinds == {"I8", "F32"}
    assert all((t.scale > 0).all() for t in source.tensors.values() if t.scale is not None)
    prompt = tokens_of(20)
    executable = bw.compile(graph_of(source), threads=2)
    kernels = [step.kernel for step in executable.engine.schedule.steps]
    assert sum("matmul" in name for name in kernels) and not any("dequant_m" in k for k in kernels)
    found = executable.run(feeds(prompt))["logits"]
    truth = bw.compile(graph_of(source), target="reference").run(feeds(prompt))["logits"]
    np.testing.assert_allclose(found, truth, atol=2e-2 * np.abs(truth).max())
    exact = bw.compile(graph_of(source, exact=True), threads=1).run(feeds(prompt))["logits"]
    spread = np.abs(exact - exact.mean()).mean()
    assert np.abs(found - exact).mean() < 0.1 * spread
    executable.reset()
    alone = [executable.run(feeds(prompt[i : i + 1], i))["logits"][0] for i in range(20)]
    np.testing.assert_array_equal(np.stack(alone), found)  # whatever rows run together
    one = bw.compile(graph_of(source), threads=1).run(feeds(prompt))["logits"]
    np.testing.assert_array_equal(one, found)


def test_files(quantized, tmp_path):
    source = quantized.source
    save_model(source, tmp_path / "model.bw")
    again = read_source(tmp_path / "model.bw")
    for name, tensor in source.tensors.items():
        assert again.tensors[name].format == tensor.format
        np.testing.assert_array_equal(again.tensors[name].data, tensor.data)
        np.testing.assert_array_equal(dequantized(again.tensors[name]), dequantized(tensor))
    size = (tmp_path / "model.bw").stat().st_size
    assert size < source.nbytes + 60_000
    with pytest.raises(ExportError, match="does not fit blocks of 32"):
        save_model(source, tmp_path / "model.gguf")
    second = quantize_model(again, None, "int8")  # what is in 8 bits stays nearly
    name = "blk.0.attn_q.weight"
    values = [dequantized(one.tensors[name]) for one in (second.source, source)]
    np.testing.assert_allclose(*values, atol=0.02)


def test_files_of_other_programs(tmp_path):
    pytest.importorskip("gguf", reason="the gguf package is not installed")
    save_decoder("llama", tmp_path / "hf")
    source = bw.quantize(tmp_path / "hf", None, "int8").source
    save_model(source, tmp_path / "model.gguf")
    blocks = read_source(tmp_path / "model.gguf")
    assert blocks.tensors["blk.1.ffn_up.weight"].format == "Q8_0"
    prompt = tokens_of(9)
    runs = [
        bw.compile(graph_of(one, exact=True), threads=1).run(feeds(prompt))["logits"]
        for one in (source, blocks)
    ]
    np.testing.assert_allclose(*runs, atol=1e-4 * np.abs(runs[0]).max())
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    from test_onnx_files import OrtDecoder

    save_model(source, tmp_path / "model.onnx")
    theirs = OrtDecoder(tmp_path / "model.onnx").run(prompt[None], 0)[0]
    np.testing.assert_allclose(theirs, runs[0], atol=1e-4 * np.abs(runs[0]).max())


def test_calibration_and_experts(tmp_path):
    save_decoder("mixtral", tmp_path)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, 24))
    source = bw.quantize(tmp_path, tokens, "int8", widths={"lm_head": 8}).source
    formats = {name: tensor.format for name, tensor in source.tensors.items()}
    assert formats["blk.0.attn_q.weight"] == "I8" and formats["output.weight"] == "Q8_0"
    assert formats["blk.0.ffn_up_exps.weight"] == "Q8_0"  # products of experts have blocks
    executable = bw.compile(graph_of(source), threads=1)
    run = lambda part, start: executable.run(feeds(np.asarray(part), start))["logits"]
    assert len(tiny_models.greedy(run, tokens_of(5), 4)) == 4


def test_a_damaged_file(quantized, tmp_path):
    path = tmp_path / "model.bw"
    graph = quantized.source.saved_graph()
    key = "language_model.formats"
    graph.with_(meta={**graph.meta, key: graph.meta[key].replace('"I8"', '"Q8_0"')}).save(path)
    with pytest.raises(BitwrightError, match=r"damaged: tensor .* does not fit its format"):
        read_source(path)
