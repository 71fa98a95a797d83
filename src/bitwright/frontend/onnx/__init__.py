"""ONNX models to graphs.

    graph = load("model.onnx")

`read` opens the file, `importer` converts its nodes, and the modules of `standard` and `microsoft`
map each op.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bitwright.errors import BitwrightError, ImportModelError, UnsupportedError
from bitwright.frontend.onnx.importer import Importer
from bitwright.frontend.onnx.read import read_model
from bitwright.ir import Graph
from bitwright.ops.core.check import verify

__all__ = ["load", "load_with_files"]


def load(model: Any) -> Graph:
    """The graph of a model: a path, the bytes of a file, or an `onnx.ModelProto`."""
    return load_with_files(model)[0]


def load_with_files(model: Any) -> tuple[Graph, tuple[Path, ...]]:
    """The graph of a model, and the external files that hold its weights.

    An invalid model raises `ImportModelError`. A valid but unsupported one raises
    `UnsupportedError`, which names the op, the node and the reason. No other exception is raised.
    """
    try:
        file = read_model(model)
        return verify(Importer(file).graph()), tuple(file.mapped)
    except ImportModelError:
        raise
    except BitwrightError as error:
        raise ImportModelError(f"the model cannot be imported: {error}") from error
    except RecursionError:
        raise UnsupportedError("the model is nested too deeply") from None
    except MemoryError:
        raise ImportModelError("there is not enough memory to import the model") from None
    except Exception as error:
        raise ImportModelError(
            f"the model cannot be imported: {type(error).__name__}: {error}",
            hint="It may be damaged.",
        ) from error
