"""Models of text and bytes: vowels, transliteration, pronunciation, file types."""

from __future__ import annotations

import numpy as np

from models.draw import Array, Draw
from models.table import Model


def _tashkeel(draw: Draw, batch: int, length: int) -> dict[str, Array]:
    return {
        "char_inputs": draw.tokens(40, batch, length, low=1),
        "diac_inputs": draw.tokens(15, batch, length),
        "input_lengths": np.arange(length, length - batch, -1),
    }


def _thai_decoder(draw: Draw, length: int) -> dict[str, Array]:
    return {
        "decoder_input": draw.tokens(40, 1, 1).astype(np.int32),
        "decoder_hidden_1": draw.normal(1, 1, 256),
        "encoder_outputs": draw.normal(1, length, 256),
        "mask": (np.arange(length) < length - 2).astype(np.float32)[None],
    }


TEXT = (
    Model(
        "nakdimon",
        "pypi:piper-tts==1.8.0",
        r"hebrew/nakdimon\.onnx$",
        "vowels for Hebrew: four Loops are a bidirectional LSTM; tf2onnx",
        "GPL-3.0",
        ((1, 20), (2, 9), (3, 33)),
        lambda draw, *size: {"input_1": draw.tokens(40, *size, low=1).astype(np.float32)},
    ),
    Model(
        "tashkeel",
        "pypi:piper-tts==1.8.0",
        r"tashkeel/model\.onnx$",
        "vowels for Arabic: GRU, attention, TopK, packed sequences; PyTorch 2.1",
        "GPL-3.0",
        ((1, 24), (2, 17), (3, 40)),
        _tashkeel,
    ),
    Model(
        "thai2rom-encoder",
        "pypi:pythainlp==5.4.0",
        r"thai2rom_encoder\.onnx$",
        "transliteration: packed bidirectional LSTM; PyTorch 1.8",
        "Apache-2.0",
        ((6,), (11,), (20,)),
        lambda draw, length: {
            "input_tensor": draw.tokens(60, 1, length, low=1),
            "input_lengths": np.array([length], np.int32),
        },
    ),
    Model(
        "thai2rom-decoder",
        "pypi:pythainlp==5.4.0",
        r"thai2rom_decoder\.onnx$",
        "transliteration: one step of an LSTM with attention; PyTorch 1.8",
        "Apache-2.0",
        ((6,), (11,), (20,)),
        _thai_decoder,
    ),
    Model(
        "deepcut",
        "pypi:pythainlp==5.4.0",
        r"deepcut\.onnx$",
        "word boundaries in Thai: embeddings and convolutions; tf2onnx",
        "Apache-2.0",
        ((1,), (7,), (30,)),
        lambda draw, count: {
            "input_1": draw.tokens(100, count, 21).astype(np.float32),
            "input_2": draw.tokens(10, count, 21).astype(np.float32),
        },
    ),
    Model(
        "magika",
        "pypi:magika==1.0.3",
        r"standard_v3_3/model\.onnx$",
        "file types from bytes; tf2onnx",
        "Apache-2.0",
        ((1,), (2,), (5,)),
        lambda draw, count: {"bytes": draw.tokens(257, count, 2048).astype(np.int32)},
    ),
    Model(
        "bert-pron",
        "pypi:g2p-id==0.0.4",
        r"bert_pron\.onnx$",
        "pronunciation: masked transformer; tf2onnx",
        "MIT",
        ((1,), (2,), (5,)),
        lambda draw, count: {"input_1": draw.tokens(30, count, 32)},
    ),
    Model(
        "tiny-pron",
        "pypi:g2p-id==0.0.4",
        r"tiny-pron\.onnx$",
        "pronunciation: transformer with its decoding loop unrolled to 7,000 nodes; PyTorch 1.11",
        "MIT",
        ((1,),),
        lambda draw, count: {"text": draw.tokens(29, count, 28, low=1)},
    ),
)
