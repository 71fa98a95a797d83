"""Exports graphs to ONNX: `export_onnx(graph, "model.onnx")`.

    Graph ─ convert ─▶ Scope (ONNX nodes, values unnamed) ─ protos ─▶ GraphProto ─ files ─▶ disk

The file keeps the names of inputs, outputs and parameters and the symbolic sizes (`seq`, `2*seq` as
`dim_param`); nodes compute the sizes that attributes use from the shapes of inputs. A state `s`
becomes an input `s` and an output `s.next`, which the caller passes to the next run. Its initial
value, if not zeros, is the initializer `s.initial`.
"""

from __future__ import annotations

from pathlib import Path

from onnx import ModelProto

from bitwright import __version__
from bitwright.errors import ExportError
from bitwright.export.onnx.arithmetic import without_two_bits
from bitwright.export.onnx.convert import convert
from bitwright.export.onnx.files import fill, write_model
from bitwright.export.onnx.metadata import DOC, metadata_of, region_metadata, state_arrays
from bitwright.export.onnx.options import options_for
from bitwright.export.onnx.protos import graph_proto, initializer_items, model_proto
from bitwright.export.onnx.zero_points import with_unsigned_values, without_zero_points
from bitwright.ir import Graph, TensorType
from bitwright.ir.dtype import f4e2m1, f8e8m0
from bitwright.warn import warn_once

__all__ = ["export_onnx"]


def export_onnx(
    graph: Graph,
    path: str | Path | None = None,
    *,
    opset: int | None = None,
    external_data: bool | str | None = None,
    consumer: str = "any",
    **options: str | None,
) -> ModelProto | None:
    """Write the graph to `path`, or return it as a `ModelProto` if there is no path.

    `opset` defaults to the lowest that can represent the model. `external_data` puts the tensors
    into a separate file (True, or its name), into the model (False), or into the model if it is
    small enough (None).

    `consumer` is the runtime of a quantized model: files for "any" are correct in ONNX Runtime and
    OpenVINO on every x86 processor; those for "onnxruntime", "openvino" and "bitwright" may be
    faster there. It sets the defaults of the options `functions`, `zero_points`, `weight_type`,
    `weights`, `activations` and `rounding` (`export.onnx.options`).
    """
    chosen = options_for(consumer, **options)
    if chosen.zero_points == "zero":
        graph = without_zero_points(graph)
    if chosen.weight_type == "u8":
        graph = with_unsigned_values(graph)
    if chosen.weights == "arithmetic":
        graph = without_two_bits(graph)
    body = convert(graph, opset, chosen)
    tensors = [*initializer_items(body), *state_arrays(graph)]
    _warn_of_element_types(graph)
    session, proto = body.scope.session, graph_proto(body, initializers=False)
    metadata = metadata_of(graph) | region_metadata(session.regions, proto, tensors)
    model = model_proto(proto, session, metadata, __version__)
    if doc := graph.meta.get(DOC):
        model.doc_string = doc
    if path is None:
        if external_data:
            raise ExportError("external data needs a path", hint="Give the model's file name.")
        return fill(model, tensors)
    write_model(model, tensors, Path(path), external_data)
    return None


_OWN_TYPES = (f8e8m0, f4e2m1)
"""Element types that ONNX Runtime 1.31 and OpenVINO 2026.4 do not dequantize."""


def _warn_of_element_types(graph: Graph) -> None:
    """Warn if no other runtime can load the file."""
    values = (value for _, node in graph.walk() for value in node.outputs)
    found = {v.dtype.name for v in values if isinstance(v.type, TensorType)}
    own = sorted(found & {element.name for element in _OWN_TYPES})
    if own:
        warn_once(
            f"ONNX files with {', '.join(own)}",
            "bitwright runs them; ONNX Runtime and OpenVINO do not load them",
        )
