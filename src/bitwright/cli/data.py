"""`--data` and its options, for calibration and for training."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import wraps
from pathlib import Path
from typing import Any

import click

from bitwright.errors import CalibrationError

FORMS = (
    "a folder of .npz (one array per input) or .npy files, one batch per file; "
    "one such file of many samples; .csv; or a folder of images."
)
HELP = f"Calibration data: {FORMS}"
TRAINING = f"Training data: {FORMS} Labels are a further array or column."
_IMAGE_OPTIONS = ("resize", "mean", "std", "layout")


def _numbers(ctx: click.Context, option: click.Parameter, value: str | None) -> Any:
    """`0.485,0.456,0.406`, or fractions as in `1/255`."""
    if value is None:
        return None
    try:
        return [float(Fraction(part.strip())) for part in value.split(",")]
    except (ValueError, ZeroDivisionError):
        raise click.BadParameter(f"{value!r} is not a list of numbers") from None


def _size(ctx: click.Context, option: click.Parameter, value: str | None) -> Any:
    """`224`, `224,320` or `224x320`: height and width."""
    if value is None:
        return None
    parts = value.lower().replace("x", ",").split(",")
    if len(parts) > 2 or not all(part.strip().isdigit() and int(part) for part in parts):
        raise click.BadParameter(f"{value!r} is not HEIGHT,WIDTH")
    return [int(part) for part in parts]


_OPTIONS = (
    click.option(
        "--batch-size",
        type=click.IntRange(1),
        help="Samples per batch, if neither files nor model fix it.",
    ),
    click.option("--resize", callback=_size, help="Images: HEIGHT,WIDTH; default: the model's."),
    click.option("--mean", callback=_numbers, help="Images: subtracted from pixels / 255."),
    click.option(
        "--std", callback=_numbers, help="Images: divisor after the mean; 1/255 undoes the 255."
    ),
    click.option("--layout", type=click.Choice(["nchw", "nhwc"]), help="Images: axis order."),
)


def data_options(required: bool = False) -> Callable[[Any], Any]:
    """`--data` with its options; the command gets one argument `data`, or None."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def call(*args: Any, data: str | None, batch_size: int | None, **rest: Any) -> Any:
            images = _image_options(rest)
            return command(*args, data=_source(data, batch_size, images), **rest)

        for option in reversed(_OPTIONS):
            call = option(call)
        return click.option("--data", type=click.Path(), required=required, help=HELP)(call)

    return decorate


def training_data_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--data` and `--evaluate`; the command gets `data`, `evaluate` and `batch_size`."""

    @wraps(command)
    def call(
        *args: Any, data: str, evaluate: str | None, batch_size: int | None, **rest: Any
    ) -> Any:
        images = _image_options(rest)
        sources = [
            None if path is None else _source(path, batch_size if images else None, images)
            for path in (data, evaluate)
        ]
        given = {"data": sources[0], "evaluate": sources[1], "batch_size": batch_size}
        return command(*args, **given, **rest)

    for option in reversed(_OPTIONS):
        call = option(call)
    text = "Held-out data of the same kinds, for evaluations after each epoch."
    call = click.option("--evaluate", type=click.Path(), help=text)(call)
    return click.option("--data", type=click.Path(), required=True, help=TRAINING)(call)


def _image_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options of images that were given, taken out of all options."""
    given = {name: options.pop(name) for name in _IMAGE_OPTIONS}
    return {name: value for name, value in given.items() if value is not None}


def _source(path: str | None, batch_size: int | None, images: dict[str, Any]) -> Any:
    """The data source of the library."""
    if path is None:
        if images or batch_size:
            raise CalibrationError("options of --data need --data")
        return None
    if not images and batch_size is None:
        return path
    from bitwright.quant.data.images import Images
    from bitwright.quant.data.sources import Folder

    if not images:
        return Folder(path, batch_size)
    place = Path(path)
    if place.exists() and not (place.is_file() or Images.are_in(place)):
        option = next(iter(images))
        raise CalibrationError(f"--{option} is for images, and {path} has none")
    return Images(path, batch_size=batch_size, **images)
