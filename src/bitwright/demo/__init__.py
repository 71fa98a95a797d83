"""The demo model, a small digit classifier, and its images (see README.md in this folder).

The model takes `image: f32[batch, 1, 8, 8]`, values 0 to 1, and returns `logits: f32[batch, 10]`.
Calibration images are part of the training set; the held-out images are not.
"""

from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_FOLDER = Path(__file__).parent
_PIXEL_MAX = 16


def model_path() -> Path:
    """The ONNX file."""
    return _FOLDER / "digits.onnx"


def calibration(batch_size: int = 32) -> list[dict[str, Array]]:
    """128 training images as batches of model inputs."""
    images = _scaled(_arrays()["calibration_images"])
    return [
        {"image": images[start : start + batch_size]} for start in range(0, len(images), batch_size)
    ]


def held_out() -> tuple[dict[str, Array], Array]:
    """Model inputs for the 600 held-out images, and their labels, i64[600]."""
    arrays = _arrays()
    return {"image": _scaled(arrays["held_out_images"])}, arrays["held_out_labels"].astype(np.int64)


def _arrays() -> dict[str, Array]:
    with np.load(_FOLDER / "digits.npz") as file:
        return dict(file)


def _scaled(images: Array) -> Array:
    """u8[n, 8, 8] with values 0 to 16 -> f32[n, 1, 8, 8] with values 0 to 1."""
    return images[:, None].astype(np.float32) / np.float32(_PIXEL_MAX)
