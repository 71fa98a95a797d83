"""The five models of the project's yardstick, which its `tasks.py` prepares."""

from __future__ import annotations

import numpy as np

from models.table import Feed, Size

YARDSTICK: dict[str, tuple[tuple[Size, ...], Feed]] = {
    "resnet8": (((1,), (4,), (7,)), lambda draw, n: {"input_1": draw.normal(n, 32, 32, 3)}),
    "minilm": (
        ((1, 16), (2, 33), (3, 128)),
        lambda draw, *size: {
            "input_ids": draw.tokens(30_000, *size),
            "attention_mask": np.ones(size, np.int64),
            "token_type_ids": np.zeros(size, np.int64),
        },
    ),
    "mobilenetv2": (
        ((1,), (2,), (3,)),
        lambda draw, n: {"x": draw.signed_pictures(n, 3, 224, 224)},
    ),
    "ppocr": (
        ((1, 48, 192), (2, 48, 320), (1, 48, 101)),
        lambda draw, n, *size: {"x": draw.signed_pictures(n, 3, *size)},
    ),
    "stories15m": (
        ((1, 16), (2, 40), (1, 127)),
        lambda draw, *size: {"ids": draw.tokens(32_000, *size)},
    ),
}
