"""Writes a language model as ONNX: MatMulNBits, and caches as inputs and outputs.

The names are those of Hugging Face's exporters, so that programs written for them run the file:

    input_ids, attention_mask, position_ids, past_key_values.<layer>.{key,value}
      ->  logits, present.<layer>.{key,value}

An encoder has tokens, mask -> hidden, embedding.
"""

from __future__ import annotations

from pathlib import Path

from bitwright.errors import ExportError
from bitwright.export.onnx import export_onnx
from bitwright.frontend.language.encoder import encoder_graph
from bitwright.frontend.language.exchange import PlainWeights, exchange_graph
from bitwright.frontend.language.source import ModelSource
from bitwright.ir import Graph


def onnx_graph(source: ModelSource, context: int | None = None, last_logits: bool = False) -> Graph:
    """The graph that `write_onnx` exports."""
    config, where = source.config, str(source.path)
    if config.is_encoder:
        return encoder_graph(
            config,
            source.tensors,
            where,
            weights_of=lambda b: PlainWeights(b, source.tensors, where),
        )
    if context is not None and not 1 <= context <= config.context:
        raise ExportError(
            "the context does not fit the model", expected=f"1 to {config.context}", found=context
        )
    return exchange_graph(config, source.tensors, context or config.context, where, last_logits)


def write_onnx(
    source: ModelSource,
    path: str | Path,
    *,
    context: int | None = None,
    last_logits: bool = False,
    opset: int | None = None,
    external_data: bool | str | None = None,
) -> None:
    """Write the model for ONNX Runtime.

    `last_logits` computes the logits of the last position only: [batch, 1, vocab]. `context` is
    the length that texts will have; it matters to models with two sets of rotary frequencies.
    """
    graph = onnx_graph(source, context, last_logits)
    export_onnx(graph, path, opset=opset, external_data=external_data, consumer="onnxruntime")
