"""GGUF files: reading, damaged files, and models written by the `gguf` package."""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from pathlib import Path
from random import Random

import numpy as np
import pytest
from tiny_models import feeds, reference_logits, save_decoder, tokens_of

import bitwright as bw
from bitwright.errors import BitwrightError, ExportError, ImportModelError, UnsupportedError
from bitwright.frontend.gguf.reader import read_gguf
from bitwright.frontend.gguf.tensor_types import BY_NAME, KINDS
from bitwright.frontend.language.source import read_source
from bitwright.llm.engine.session import weight_samples
from bitwright.llm.files.save import save_model
from bitwright.llm.model import load_model

gguf = pytest.importorskip("gguf")


def logits(path: Path, count: int = 9) -> np.ndarray:
    graph = load_model(path, cache="f32", exact=True).graph
    return np.asarray(bw.compile(graph, target="reference").run(feeds(tokens_of(count)))["logits"])


def test_types_are_those_of_the_package():
    for number, kind in KINDS.items():
        type_ = gguf.GGMLQuantizationType(number)
        assert (kind.name, (kind.block, kind.nbytes)) == (type_.name, gguf.GGML_QUANT_SIZES[type_])


@pytest.mark.parametrize("key", ["llama", "llama-llama3", "qwen3", "qwen2_moe", "gemma2", "phi3"])
def test_a_written_file_gives_the_same_logits(key, tmp_path):
    theirs = save_decoder(key, tmp_path / "hf")
    source = read_source(tmp_path / "hf")
    if key == "phi3":
        with pytest.raises(BitwrightError, match="ignores the sliding window"):
            save_model(source, tmp_path / "model.gguf")
        return
    save_model(source, tmp_path / "model.gguf")
    expected = reference_logits(theirs, tokens_of(9))
    found = logits(tmp_path / "model.gguf")
    np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max(), rtol=1e-4)
    again = {tensor.name for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert set(source.tensors) <= again


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1", "Q8_0", "F16", "BF16"])
def test_blocks_stay_as_they_are_stored(kind, tmp_path):
    path = tmp_path / "model.gguf"
    save_decoder("qwen2", tmp_path / "hf")
    save_model(read_source(tmp_path / "hf"), path)
    quantized = tmp_path / "quantized.gguf"
    type_ = gguf.GGMLQuantizationType[kind]
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(quantized, "qwen2")
    for key, entry in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            writer.add_key_value(key, entry.contents(), entry.types[0])
    values = {}
    for tensor in reader.tensors:
        data = np.array(tensor.data, np.float32)
        if data.ndim == 2:
            blocks = gguf.quants.quantize(data, type_)
            values[tensor.name] = blocks
            writer.add_tensor(tensor.name, blocks, raw_dtype=type_)
        else:
            writer.add_tensor(tensor.name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = read_gguf(quantized)
    for name, blocks in values.items():
        assert file.tensors[name].format == kind
        np.testing.assert_array_equal(
            file.tensors[name].data.view(np.uint8).reshape(-1), blocks.view(np.uint8).reshape(-1)
        )
    graph = load_model(quantized).graph
    stored = next(v for v in graph.parameters if v.name == "blk.0.ffn_up.weight")
    data = stored.node.attrs["value"]
    assert data.dtype == np.uint8 and not data.flags.owndata
    assert np.isfinite(logits(quantized)).all()


def small_file(path: Path) -> bytes:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", "é"])
    writer.add_uint32("llama.block_count", 1)
    writer.add_array("x.numbers", [1.5, 2.5])
    writer.add_tensor("token_embd.weight", np.arange(64, dtype=np.float32).reshape(2, 32))
    writer.add_tensor("output_norm.weight", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def test_metadata_and_tensors(tmp_path):
    path = tmp_path / "model.gguf"
    small_file(path)
    file = read_gguf(path)
    assert file.metadata["tokenizer.ggml.tokens"] == ["a", "bc", "é"]
    assert file.metadata["x.numbers"] == [1.5, 2.5]
    assert file.tensors["token_embd.weight"].shape == (2, 32)
    with pytest.raises(ImportModelError, match="'embedding_length' is not a size"):
        bw.load(path)


def test_truncated_files_are_refused(tmp_path):
    path = tmp_path / "model.gguf"
    data = small_file(path)
    for length in [*range(4, 200, 7), len(data) // 2, len(data) - 130]:
        path.write_bytes(data[:length])
        with pytest.raises(ImportModelError, match=r"truncated|cannot hold|ends in|does not hold"):
            read_gguf(path)


def test_damaged_files_raise_errors_of_the_package(tmp_path):
    """Any bytes give a model or a BitwrightError; `fuzz_language.py` tries many more."""
    save_decoder("llama", tmp_path / "hf")
    path = tmp_path / "model.gguf"
    save_model(read_source(tmp_path / "hf"), path)
    data, random = path.read_bytes(), Random(0)
    header = data.index(b"output_norm.weight") + 4000
    for _ in range(300):
        damaged = bytearray(data)
        for _ in range(random.choice((1, 2, 8))):
            at = random.randrange(min(header, len(data)))
            damaged[at] = random.choice((0, 1, 127, 128, 255, random.randrange(256)))
        path.write_bytes(bytes(damaged))
        with suppress(BitwrightError):
            load_model(path).graph_for()


@pytest.mark.parametrize(
    "sizes, offset, message",
    [
        ((1 << 63, 0), 0, "has the shape"),
        ((0, 1 << 63), 0, "has the shape"),
        ((4,), 3, "not aligned to 32"),
    ],
)
def test_shapes_and_offsets_that_no_array_has(sizes, offset, message, tmp_path):
    row = struct.pack(f"<QcI{len(sizes)}QIQ", 1, b"a", len(sizes), *sizes, 0, offset)
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + row + bytes(128))
    with pytest.raises(ImportModelError, match=message):
        read_gguf(path)


def test_formats_without_a_kernel_are_refused_or_dequantized(tmp_path):
    save_decoder("qwen2", tmp_path / "hf")
    path = tmp_path / "model.gguf"
    source = read_source(tmp_path / "hf")
    save_model(source, path)
    row = BY_NAME["Q8_1"]
    data = bytearray(path.read_bytes())
    name = b"blk.0.ffn_up.weight"
    at = data.index(name) + len(name) + 4 + 16
    assert int.from_bytes(data[at : at + 4], "little") == 0
    number = next(n for n, kind in KINDS.items() if kind is row)
    data[at : at + 4] = number.to_bytes(4, "little")
    path.write_bytes(bytes(data))
    with pytest.raises(UnsupportedError, match="the format Q8_1, which is not supported"):
        bw.load(path)
    with pytest.raises(ImportModelError, match="nothing dequantizes the format Q8_1"):
        load_model(path, dequantize=True)


def test_folders_read_nothing_outside(tmp_path):
    hf = tmp_path / "hf"
    save_decoder("llama", hf)
    (tmp_path / "secret.safetensors").write_bytes((hf / "model.safetensors").read_bytes())
    (hf / "model.safetensors").unlink()
    (hf / "model.safetensors").symlink_to(tmp_path / "secret.safetensors")
    with pytest.raises(ImportModelError, match="leads out of its folder"):
        bw.load(hf)
    (hf / "model.safetensors").unlink()
    index = '{"weight_map": {"lm_head.weight": "../secret.safetensors"}}'
    (hf / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ImportModelError, match="leads out of its folder"):
        bw.load(hf)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "rwkv9"}, "the architecture 'rwkv9' is not known"),
        ({"num_hidden_layers": "2"}, "'num_hidden_layers' is not a size"),
        ({"num_hidden_layers": 3}, "has no tensor 'blk.2"),
        ({"hidden_size": 64}, "has another shape"),
        ({"vocab_size": 1 << 60}, "'vocab_size' is not a size"),
        ({"num_key_value_heads": 3}, "the heads do not divide"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "the kind 'dynamic' are not supported"),
        ({"hidden_act": ["silu"]}, "is not supported"),
        ({"hidden_act": "mish"}, "the activation 'mish' is not supported"),
        ({"quantization_config": {}}, "another tool has quantized"),
    ],
)
def test_wrong_configurations_are_refused(change, message, tmp_path):
    import json

    save_decoder("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ImportModelError, match=message):
        bw.load(tmp_path)


def test_an_index_that_names_no_files(tmp_path):
    save_decoder("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    for file in (1, "a\0b"):
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {"lm_head.weight": file}}))
        with pytest.raises(ImportModelError, match="names the file"):
            load_model(tmp_path)


def test_sessions_of_models_that_differ_in_values_only(tmp_path):
    for seed, name in enumerate("ab"):
        save_decoder("llama", tmp_path / name)
        if seed:
            file = tmp_path / name / "model.safetensors"
            data = bytearray(file.read_bytes())
            start = 8 + int.from_bytes(data[:8], "little")
            data[start : start + 64] = bytes(64)
            file.write_bytes(bytes(data))
    first, second = (weight_samples(load_model(tmp_path / name)) for name in "ab")
    assert first == weight_samples(load_model(tmp_path / "a"))
    assert first != second


def test_onnx_export_says_how_to_save(tmp_path):
    save_decoder("llama", tmp_path)
    with pytest.raises(ExportError, match=r"no form in ONNX.*\n?.*saved as GGUF or \.bw"):
        bw.export_onnx(load_model(tmp_path).graph, tmp_path / "model.onnx")
