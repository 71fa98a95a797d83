"""Language models as ONNX: what ONNX Runtime computes equals what bitwright computes."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
import onnx
import onnxruntime as ort
import tiny_models
from tiny_models import CONTEXT, VOCAB, tokens_of

import bitwright as bw
from bitwright.errors import BitwrightError, ExportError
from bitwright.frontend.language.decoder import CacheShape
from bitwright.frontend.language.exchange import runs_of
from bitwright.frontend.language.stored import StoredTensor
from bitwright.llm.files.save import save_model
from bitwright.llm.model import DecoderModel, load_encoder
from bitwright.ops.quant.block_formats import FORMATS


class OrtDecoder:
    """Runs a file as programs for Hugging Face's exports do."""

    def __init__(self, path):
        options = ort.SessionOptions()
        options.log_severity_level, options.intra_op_num_threads = 3, 1
        self.session = ort.InferenceSession(str(path), options, ["CPUExecutionProvider"])
        self.names = [value.name for value in self.session.get_outputs()]
        self.caches = [v for v in self.session.get_inputs() if v.name.startswith("past")]
        self.past = {}

    def run(self, tokens, start, mask=None):
        """Logits [batch, …] of tokens [batch, n] behind `start` others."""
        batch, count = tokens.shape
        if start == 0:
            sizes = [(batch, v.shape[1], 0, v.shape[3]) for v in self.caches]
            pairs = zip(self.caches, sizes, strict=True)
            self.past = {v.name: np.zeros(size, np.float32) for v, size in pairs}
        mask = np.ones((batch, start + count), np.int64) if mask is None else mask
        places = np.maximum(mask.cumsum(1) - 1, 0)[:, start:]
        given = {"input_ids": tokens.astype(np.int64), "attention_mask": mask}
        found = self.session.run(self.names, given | {"position_ids": places, **self.past})
        results = dict(zip(self.names, found, strict=True))
        self.past = {
            name: results[name.replace("past_key_values", "present")] for name in self.past
        }
        return results["logits"]


def own_run(source):
    """Logits of bitwright's exact form of a model."""
    model = DecoderModel(source, CacheShape(1, CONTEXT, "f32"), exact=True)
    executable = bw.compile(model.graph, threads=1)
    return lambda tokens, start: executable.run(tiny_models.feeds(np.asarray(tokens), start))[
        "logits"
    ]


@pytest.mark.parametrize(
    ("key", "recipe", "widths"),
    [
        ("llama", "w4", None),
        ("llama-tied", "w8", {"*.attn_k": "Q5_0"}),
        ("llama-tied", "w4", {"lm_head": 4}),
        ("gemma3", "w4", None),
        ("mixtral", "w4", None),
    ],
)
def test_greedy_tokens_of_onnx_runtime(key, recipe, widths, tmp_path):
    tiny_models.save_decoder(key, tmp_path / "hf")
    quantized = bw.quantize(tmp_path / "hf", None, recipe, widths=widths)
    path = tmp_path / "model.onnx"
    quantized.save(path)
    kinds = {node.op_type for node in onnx.load(path).graph.node}
    assert "MatMulNBits" in kinds
    decoder, run, prompt = OrtDecoder(path), own_run(quantized.source), tokens_of(9)
    theirs, ours = decoder.run(prompt[None], 0)[0], run(prompt, 0)
    np.testing.assert_allclose(theirs, ours, atol=1e-5 * np.abs(ours).max(), rtol=1e-4)
    expected = tiny_models.greedy(run, prompt, 12)
    one = lambda tokens, start: decoder.run(tokens[None], start)[0]
    assert tiny_models.greedy(one, prompt, 12) == expected


def test_a_batch_with_padding_and_the_last_logits(tmp_path):
    tiny_models.save_decoder("mistral", tmp_path / "hf")
    source = bw.quantize(tmp_path / "hf", None, "w4").source
    save_model(source, tmp_path / "all.onnx")
    save_model(source, tmp_path / "last.onnx", last_logits=True, external_data=True)
    assert (tmp_path / "last.onnx.data").exists()
    decoder, last = OrtDecoder(tmp_path / "all.onnx"), OrtDecoder(tmp_path / "last.onnx")
    texts = tokens_of(8), tokens_of(13)[8:]
    alone = [decoder.run(text[None], 0)[0] for text in texts]
    tokens, mask = np.zeros((2, 8), np.int64), np.zeros((2, 8), np.int64)
    for row, text in enumerate(texts):
        tokens[row, -len(text) :], mask[row, -len(text) :] = text, 1
    together = decoder.run(tokens, 0, mask)
    for row, logits in enumerate(alone):
        np.testing.assert_allclose(together[row, -1], logits[-1], atol=2e-5, rtol=1e-4)
    found = last.run(tokens, 0, mask)
    assert found.shape == (2, 1, VOCAB)
    np.testing.assert_allclose(found[:, 0], together[:, -1], atol=2e-5, rtol=1e-4)
    steps = np.array([[5], [7]]), 8, np.hstack([mask, np.ones((2, 1), np.int64)])
    np.testing.assert_allclose(last.run(*steps), decoder.run(*steps), atol=2e-5, rtol=1e-4)
    with pytest.raises(ExportError, match="context does not fit"):
        save_model(source, tmp_path / "x.onnx", context=CONTEXT + 1)
    with pytest.raises(BitwrightError, match="have no option 'last_logits'"):
        save_model(source, tmp_path / "x.gguf", last_logits=True)


def test_an_encoder(tmp_path):
    transformers, torch = (pytest.importorskip(name) for name in ("transformers", "torch"))
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
    }
    theirs = transformers.BertModel(transformers.BertConfig(**sizes)).eval()
    theirs.save_pretrained(tmp_path / "hf")
    quantized = bw.quantize(tmp_path / "hf", None, "w8")
    quantized.save(tmp_path / "model.onnx")
    quantized.save(tmp_path / "model.bw")
    session = ort.InferenceSession(str(tmp_path / "model.onnx"))
    feeds = {
        "tokens": np.stack([tokens_of(9), tokens_of(9)[::-1]]),
        "mask": np.array([[1] * 9, [1] * 5 + [0] * 4], np.int32),
    }
    exact = load_encoder(tmp_path / "model.bw", exact=True).graph
    expected = bw.compile(exact, target="reference").run(feeds)["embedding"]
    np.testing.assert_allclose(session.run(["embedding"], feeds)[0], expected, atol=1e-5)


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if not form.is_float])
def test_the_integers_of_every_format(name):
    form = FORMATS[name]
    blocks = np.random.default_rng(0).integers(0, 256, (6, 2 * form.nbytes), dtype=np.uint8)
    expected = form.dequantize(blocks)
    blocks[~np.isfinite(expected).all(1)] = 0
    expected = form.dequantize(blocks)
    found = runs_of(StoredTensor("w", name, expected.shape, blocks))
    spread = lambda values: np.repeat(values.astype(np.float64), found.run, axis=1)
    values = found.q.astype(np.float64) * spread(found.scale)
    if found.minimum is not None:
        values -= spread(found.minimum)
    np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())
