"""ONNX out: `export_onnx(graph, "model.onnx")`.

    Graph ─ convert ─▶ Scope (ONNX nodes, values unnamed) ─ protos ─▶ GraphProto ─ files ─▶ disk

Names of inputs, outputs and parameters stay, symbolic sizes stay (`seq`, `2*seq` as `dim_param`),
and sizes in attributes are computed from the shapes of inputs. A state `s` becomes an input `s` and
an output `s.next`: the caller gives the first and carries the second to the next run; what the
state held at first, if not zeros, is in the initializer `s.initial`.
"""

from __future__ import annotations

from pathlib import Path

from onnx import ModelProto

from bitwright import __version__
from bitwright.errors import ExportError
from bitwright.export.onnx.convert import convert
from bitwright.export.onnx.files import fill, write_model
from bitwright.export.onnx.metadata import DOC, metadata_of, state_arrays
from bitwright.export.onnx.options import Options
from bitwright.export.onnx.protos import graph_proto, initializer_items, model_proto
from bitwright.export.onnx.zero_points import without_zero_points
from bitwright.ir.graph import Graph

__all__ = ["export_onnx"]


def export_onnx(
    graph: Graph,
    path: str | Path | None = None,
    *,
    opset: int | None = None,
    external_data: bool | str | None = None,
    functions: str = "local",
    zero_points: str = "any",
    weights: str = "dequantize",
) -> ModelProto | None:
    """Write the graph to `path`, or give it as a `ModelProto` where there is none.

    `opset`: the least that holds the model, unless given. `external_data`: the tensors go into a
    file beside the model (True, or its name), into the model (False), or wherever they fit (None).

    For other consumers of quantized models: `functions="inline"` writes no functions of the model,
    `zero_points="zero"` only zero points of 0, and `weights="nbits"` weight-only products as
    MatMulNBits of com.microsoft.
    """
    options = Options(functions, zero_points, weights)
    if zero_points == "zero":
        graph = without_zero_points(graph)
    body = convert(graph, opset, options)
    model = model_proto(
        graph_proto(body, initializers=False), body.scope.session, metadata_of(graph), __version__
    )
    if doc := graph.meta.get(DOC):
        model.doc_string = doc
    tensors = [*initializer_items(body), *state_arrays(graph)]
    if path is None:
        if external_data:
            raise ExportError("external data needs a path", hint="Give the model's file name.")
        return fill(model, tensors)
    write_model(model, tensors, Path(path), external_data)
    return None
