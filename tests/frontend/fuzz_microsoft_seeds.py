"""Models of one com.microsoft node for the fuzzer."""

from __future__ import annotations

from typing import Any

import numpy as np
from fuzz_seeds import Seed
from one_node import model

ELEMENTS = {"f": np.float32, "i": np.int32, "l": np.int64, "u": np.uint8, "c": np.int8}
Q = ["u 2 3 4", "f", "u"]
HEADS = {"num_heads": 2}
GROUPS = {"num_heads": 4, "kv_num_heads": 2}
SOFTMAX = {"axis": -1, "opset": 13}
POOL = {"kernel_shape": [2, 2]}
CONV = ["u 1 3 6 6", "f", "u", "c 4 3 3 3", "f", "c", "f", "u", "i 4"]
BITS = {"K": 32, "N": 5, "block_size": 16}
EXPERTS = {"k": 2, "activation_type": "silu"}

MODELS: list[tuple[str, list[str], dict[str, Any], tuple[int, ...]]] = [
    ("BiasGelu", ["f 2 5 8", "f 8"], {}, ()),
    ("FusedConv", ["f 1 3 6 6", "f 4 3 3 3", "f 4"], {"activation": "Relu"}, (1, 2)),
    ("FusedGemm", ["f 3 4", "f 5 4", "f 5"], {"activation": "Relu", "transB": 1}, (1, 2)),
    ("FusedMatMul", ["f 2 3 4", "f 2 5 4"], {"transB": 1, "alpha": 0.3}, ()),
    ("SkipLayerNormalization", ["f 2 5 8", "f 2 5 8", "f 8", "f 8", "f 8"], {}, (2, 3, 4)),
    (
        "EmbedLayerNormalization",
        ["i 2 5", "i 2 5", "f 9 8", "f 9 8", "f 9 8", "f 8", "f 8"],
        {},
        (),
    ),
    ("Attention", ["f 2 5 8", "f 8 24", "f 24", "i 2 5", "f 2 2 2 3 4"], HEADS, (1, 2)),
    ("MultiHeadAttention", ["f 2 5 8", "f 2 7 8", "f 2 7 8", "f 24", "i 2 7"], HEADS, ()),
    ("MultiHeadAttention", ["f 2 5 2 3 4"], HEADS, ()),
    ("GroupQueryAttention", ["f 2 5 64", "f 2 5 32", "f 2 5 32", "", "", "i 2", "i 1"], GROUPS, ()),
    (
        "GroupQueryAttention",
        ["f 2 1 128", "", "", "f 2 2 6 16", "f 2 2 6 16", "i 2", "i 1", "f 11 8", "f 11 8"],
        {**GROUPS, "do_rotary": 1},
        (),
    ),
    ("RotaryEmbedding", ["f 2 5 16", "l 2 5", "f 11 4", "f 11 4"], {}, (2, 3)),
    ("MatMulNBits", ["f 3 32", "u 5 2 8", "f 5 2", "u 5 1"], BITS, (1, 2, 3)),
    ("MatMulBnb4", ["f 3 32", "u 80", "f 10"], {**BITS, "quant_type": 1}, (1, 2)),
    ("GatherBlockQuantized", ["u 6 16", "l 2 3", "f 6 2"], {"block_size": 16}, (0, 2)),
    ("QLinearAdd", [*Q, "u 3 4", "f", "u", "f", "u"], {}, ()),
    ("QLinearSoftmax", [*Q, "f", "u"], SOFTMAX, ()),
    ("QLinearAveragePool", ["u 1 3 6 6", "f", "u", "f", "u"], POOL, ()),
    ("QLinearConcat", ["f", "u", *Q, *Q], {"axis": 1}, ()),
    ("QLinearConv", CONV, {"pads": [1, 1, 1, 1]}, (3, 8)),
    ("QGemm", ["u 3 4", "f", "u", "c 4 6", "f 6", "c 6", "i 6", "f", "u"], {}, (3, 4, 5)),
    ("QAttention", ["u 2 5 8", "c 8 24", "f 24", "f", "f", "i 2", "u", "c"], HEADS, (1,)),
    ("DynamicQuantizeMatMul", ["f 2 3 4", "c 4 6", "f 6", "c 6", "f 6"], {}, (1, 2)),
    (
        "DynamicQuantizeLSTM",
        ["f 5 2 3", "c 1 3 16", "c 1 4 16", "f 1 32", "", "", "", "", "f 1", "c 1", "f 1", "c 1"],
        {"hidden_size": 4},
        (1, 2, 8, 9, 10, 11),
    ),
    ("MoE", ["f 5 16", "f 5 4", "f 4 32 16", "f 4 32", "f 4 16 32"], EXPERTS, (2, 3, 4)),
    ("QMoE", ["f 5 16", "f 5 4", "u 4 32 8", "f 4 32", "", "u 4 16 16", "f 4 16"], EXPERTS, (2, 5)),
    ("CropAndResize", ["f 2 3 6 7", "f 4 4", "i 4", "i 2"], {}, (3,)),
    ("GridSample", ["f 2 3 5 6", "f 2 4 3 2"], {"mode": "bicubic", "padding_mode": "border"}, ()),
    ("Inverse", ["f 2 4 4"], {}, ()),
    ("Range", ["l", "l", "l"], {}, (0, 1)),
    ("UnfoldTensor", ["f 2 7 3"], {"dim": 1, "size": 3, "step": 2}, ()),
    ("GroupNorm", ["f 2 3 4 6", "f 6", "f 6"], {"groups": 2, "activation": 1}, ()),
]


def operand(text: str) -> np.ndarray[Any, Any] | None:
    if not text:
        return None
    letter, *sizes = text.split()
    shape = tuple(map(int, sizes))
    return (np.arange(int(np.prod(shape))) % 5 + 1).reshape(shape).astype(ELEMENTS[letter])


def microsoft_seeds() -> list[Seed]:
    found = []
    for op_type, operands, attrs, constants in MODELS:
        inputs = [operand(text) for text in operands]
        proto = model(op_type, inputs, constants=constants, dynamic={2: "batch"}, **attrs)
        found.append(Seed(op_type, proto.SerializeToString()))
    return found
