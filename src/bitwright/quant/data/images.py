"""Calibration data from image files in a folder (and its subfolders), or from one image.

    x = (pixel / 255 - mean) / std        for floating inputs; unchanged pixels for u8 inputs

Images are resized to `resize`, or to the model's fixed size, without keeping the aspect ratio.
Without a size, each image is one batch. Pillow reads the files (`pip install bitwright[images]`).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bitwright.errors import CalibrationError
from bitwright.ir.arrays import Array
from bitwright.ir.dim import Dim
from bitwright.ir.dtype import u8
from bitwright.ir.graph import Graph, Value
from bitwright.ir.types import TensorType
from bitwright.quant.data.folders import files_in
from bitwright.quant.data.splitting import BATCH_SIZE

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
LAYOUTS = ("auto", "nchw", "nhwc")
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


class Images:
    """Images at a path, converted to the layout of the model's input."""

    def __init__(
        self,
        path: str | Path,
        *,
        resize: int | Sequence[int] | None = None,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        layout: str = "auto",
        batch_size: int | None = None,
    ) -> None:
        self.path = Path(path)
        if layout not in LAYOUTS:
            raise CalibrationError("unknown layout", expected=LAYOUTS, found=layout)
        self.resize = _height_and_width(resize)
        self.mean, self.std = _per_channel("mean", mean), _per_channel("std", std)
        if self.std is not None and not (self.std > 0).all():
            raise CalibrationError("std is not positive", found=self.std.tolist())
        self.layout, self.batch_size = layout, batch_size

    @staticmethod
    def are_in(folder: Path) -> bool:
        return (
            next((f for f in folder.rglob("*") if f.suffix.lower() in SUFFIXES), None) is not None
        )

    def batches_for(self, graph: Graph) -> Sequence[Array]:
        """Batches for the model's one input."""
        require_pillow()
        if self.path.is_file():
            files = [self.path]
        elif self.path.is_dir():
            files = files_in(self.path, SUFFIXES, nested=True)
        else:
            raise CalibrationError(f"there is no data at {self.path}")
        if not files:
            raise CalibrationError(f"{self.path} has no images", expected=", ".join(SUFFIXES))
        if len(graph.inputs) != 1:
            raise CalibrationError(
                f"images are one input, and the model has {len(graph.inputs)}",
                hint="Use .npz files with one array per input name.",
            )
        return _Batches(files, self, _Form.of(graph.inputs[0], self))


@dataclass(frozen=True)
class _Form:
    """Shape and layout of the model's image input."""

    input: Value
    is_channels_last: bool
    channels: int
    height: int | None
    width: int | None
    batch: int
    has_batch_axis: bool

    @staticmethod
    def of(value: Value, images: Images) -> _Form:
        type_ = value.type
        where = f"input {value.name!r}"
        if not isinstance(type_, TensorType) or type_.rank not in (3, 4):
            raise CalibrationError(
                "is not an image input",
                where=where,
                expected="a tensor of rank 4 (or 3)",
                found=type_,
            )
        if not type_.dtype.is_float and type_.dtype != u8:
            raise CalibrationError(
                "has no pixel type", where=where, expected="a floating type or u8", found=type_
            )
        first, second, last = type_.shape[-3:]
        is_last = images.layout == "nhwc" or (
            images.layout == "auto" and first not in _MODES and last in _MODES
        )
        channels, height, width = (last, first, second) if is_last else (first, second, last)
        if isinstance(channels, Dim) or channels not in _MODES:
            raise CalibrationError(
                "has an unsupported number of channels",
                where=where,
                expected=f"1, 3 or 4 in layout {'nhwc' if is_last else 'nchw'}",
                found=type_,
                hint="The layout sets the channel axis (--layout, layout=).",
            )
        fixed = tuple(size if isinstance(size, int) else None for size in (height, width))
        size = images.resize or fixed
        for axis, fixed_size, asked in zip(("height", "width"), fixed, size, strict=True):
            if fixed_size is not None and asked != fixed_size:
                raise CalibrationError(
                    f"has another {axis} than the resized images",
                    where=where,
                    expected=fixed_size,
                    found=asked,
                )
        has_batch_axis = type_.rank == 4
        batch = type_.shape[0] if has_batch_axis else 1
        if not isinstance(batch, int):
            batch = images.batch_size or BATCH_SIZE
        if None in size and has_batch_axis and not isinstance(type_.shape[0], int):
            batch = 1
        return _Form(value, is_last, channels, size[0], size[1], batch, has_batch_axis)


class _Batches(Sequence[Any]):
    """Batches of images, read on access."""

    def __init__(self, files: list[Path], images: Images, form: _Form) -> None:
        self._files, self._form = files, form
        self._mean = _fitted("mean", images.mean, form, 0.0)
        self._std = _fitted("std", images.std, form, 1.0)

    def __len__(self) -> int:
        return math.ceil(len(self._files) / self._form.batch)

    def __getitem__(self, number: Any) -> Any:
        if number >= len(self):
            raise IndexError(number)
        size = self._form.batch
        read = [self._image(f) for f in self._files[number * size : (number + 1) * size]]
        return np.stack(read) if self._form.has_batch_axis else read[0]

    def _image(self, path: Path) -> Array:
        form, element = self._form, self._form.input.dtype
        pixels = _read(path, form)
        if element != u8:
            scaled = (pixels.astype(np.float32) / np.float32(255) - self._mean) / self._std
            pixels = scaled.astype(element.numpy)
        return pixels if form.is_channels_last else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _read(path: Path, form: _Form) -> Array:
    """Pixels [height, width, channels]."""
    image_module = require_pillow()
    try:
        with image_module.open(path) as image:
            image = image.convert(_MODES[form.channels])
            if form.height is not None or form.width is not None:
                size = form.width or image.width, form.height or image.height
                image = image.resize(size, image_module.Resampling.BILINEAR)
            pixels = np.asarray(image)
    except (OSError, ValueError, SyntaxError, image_module.DecompressionBombError) as error:
        raise CalibrationError(f"cannot read the image {path.name}: {error}") from None
    return pixels[..., None] if pixels.ndim == 2 else pixels


def require_pillow() -> Any:
    """Pillow's image module; raises with installation instructions."""
    try:
        return importlib.import_module("PIL.Image")
    except ImportError:
        raise CalibrationError(
            "reading images needs Pillow", hint="pip install bitwright[images]"
        ) from None


def _height_and_width(size: Any) -> tuple[int, int] | None:
    if size is None:
        return None
    sizes = [size, size] if isinstance(size, int) else list(size)
    if len(sizes) == 1:
        sizes *= 2
    if len(sizes) != 2 or not all(isinstance(s, int) and s > 0 for s in sizes):
        raise CalibrationError("invalid image size", expected="height and width", found=size)
    return sizes[0], sizes[1]


def _per_channel(name: str, values: Any) -> Array | None:
    if values is None:
        return None
    found = np.atleast_1d(np.asarray(values, np.float32))
    if found.ndim != 1 or not np.isfinite(found).all():
        raise CalibrationError(f"{name} is not a list of numbers", found=values)
    return found


def _fitted(name: str, values: Array | None, form: _Form, default: float) -> Array:
    """One value per channel."""
    if values is None:
        return np.full(form.channels, default, np.float32)
    if form.input.dtype == u8:
        raise CalibrationError(f"{name} is for floating inputs", found=form.input.type)
    if values.size not in (1, form.channels):
        raise CalibrationError(
            f"{name} has the wrong number of channels", expected=form.channels, found=values.size
        )
    return np.broadcast_to(values, (form.channels,))
