"""File formats that hold no graph, and what to do with such a file instead.

PyTorch files hold weights or pickled Python objects. This module never unpickles a file.
"""

from __future__ import annotations

import zipfile
from contextlib import suppress
from pathlib import Path

from bitwright.errors import ImportModelError

_TRACE = "graph = bw.from_torch(module, (x,))"
_WEIGHTS = f"Build the module in Python, load its weights, and trace it: {_TRACE}."
_ZIP, _PICKLE, _HDF5 = b"PK\x03\x04", b"\x80", b"\x89HDF"


def refuse_unsupported_formats(path: Path, start: bytes) -> None:
    """Raise if the first bytes show that the file is in an unsupported format."""
    if start.startswith(_ZIP):
        what, hint = _describe_archive(path)
    elif start.startswith(_PICKLE) and path.suffix != ".onnx":
        what, hint = "a pickle, as older versions of PyTorch write", _WEIGHTS
    elif path.suffix == ".safetensors":
        what, hint = "weights without a graph", f"{_WEIGHTS} bw.load_parameters fills a graph."
    elif start.startswith(_HDF5):
        what, hint = "an HDF5 file, as Keras writes", "Export the model to ONNX, with tf2onnx."
    elif start[4:8] == b"TFL3":
        what, hint = "a TensorFlow Lite model", "Convert it to ONNX, with tf2onnx."
    else:
        return
    raise ImportModelError(
        f"{path.name} is {what}", expected="an .onnx, .bw or .txt file", hint=hint
    )


def _describe_archive(path: Path) -> tuple[str, str]:
    """The content of a zip file, and a hint."""
    names: list[str] = []
    with suppress(OSError, zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
        names = archive.namelist()
    ends = {name.rpartition("/")[2] for name in names}
    if "archive_format" in ends or path.suffix == ".pt2":
        hint = f"Load it, and give the program: bw.load(torch.export.load({path.name!r}))."
        return "a program of torch.export", hint
    if "constants.pkl" in ends:
        return "a TorchScript file", f"Trace the module that it was made of: {_TRACE}."
    if "data.pkl" in ends:
        return "a file of PyTorch that holds weights or pickled objects, and no graph", _WEIGHTS
    if any(name.endswith(".npy") for name in names):
        return "an archive of arrays", "Give it as data or inputs."
    return "a zip archive", "Give the model in it."
