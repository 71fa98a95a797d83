"""Runs ONNX models in other runtimes: those that are installed, on the processor at hand."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bitwright.errors import BitwrightError
from bitwright.ir.arrays import Array

Run = Callable[[Mapping[str, Array]], dict[str, Array]]
NAMES = {"onnxruntime": "ONNX Runtime", "openvino": "OpenVINO"}


class RuntimeRefusalError(BitwrightError):
    """The other runtime does not load or run the model."""


def require_runtime(name: str) -> None:
    """Raise an error unless the runtime is known and installed."""
    if name not in NAMES:
        raise BitwrightError(f"{name!r} is not a runtime", expected=" or ".join(NAMES))
    if importlib.util.find_spec(name) is None:
        raise BitwrightError(
            f"{NAMES[name]} is not installed", hint=f"Install it: pip install {name}"
        )


def version(name: str) -> str:
    """The name and version of a runtime."""
    return f"{NAMES[name]} {importlib.import_module(name).__version__.split('-')[0]}"


def load_model(name: str, model: Path | bytes) -> Run:
    """A function that runs the model, a path or the bytes of a file, in the named runtime."""
    try:
        return (_onnxruntime if name == "onnxruntime" else _openvino)(model)
    except RuntimeRefusalError:
        raise
    except Exception as error:  # whatever the other package raises
        raise _refusal(name, "load", error) from None


def _refusal(name: str, what: str, error: Exception) -> RuntimeRefusalError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = next((line for line in reversed(lines)), type(error).__name__)
    return RuntimeRefusalError(f"{NAMES[name]} does not {what} it: {text[:300]}")


def _onnxruntime(model: Path | bytes) -> Run:
    onnxruntime: Any = importlib.import_module("onnxruntime")

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    source = model if isinstance(model, bytes) else str(model)
    session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def run(feeds: Mapping[str, Array]) -> dict[str, Array]:
        try:
            return dict(zip(names, session.run(None, dict(feeds)), strict=True))
        except Exception as error:
            raise _refusal("onnxruntime", "run", error) from None

    return run


def _openvino(model: Path | bytes) -> Run:
    openvino: Any = importlib.import_module("openvino")

    core = openvino.Core()
    read = core.read_model(model) if isinstance(model, bytes) else core.read_model(str(model))
    compiled = core.compile_model(read, "CPU", {"INFERENCE_NUM_THREADS": 1})
    ports: list[Any] = list(compiled.outputs)

    def run(feeds: Mapping[str, Array]) -> dict[str, Array]:
        known = {name for port in compiled.inputs for name in port.get_names()}
        try:
            found = compiled({n: a for n, a in feeds.items() if n in known})
        except Exception as error:
            raise _refusal("openvino", "run", error) from None
        return {name: np.asarray(found[port]) for port in ports for name in port.get_names()}

    return run
