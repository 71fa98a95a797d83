"""The domain `com.microsoft`: what ONNX Runtime's exporters, optimizer and quantizers emit.

    @microsoft("BiasGelu", needs=2)
    def bias_gelu(ctx, node, inputs): ...

ONNX has no schemas for these ops, so each mapping declares how many operands are required. The
modules of this folder decompose every op; `REFUSED` gives the reason for those they do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

from onnx import NodeProto

from bitwright.errors import ImportModelError, UnsupportedError
from bitwright.frontend.onnx.api import Context, Inputs, OnnxNode
from bitwright.frontend.onnx.registry import Mapping, Results, UnmappedError, all_mappings, imports
from bitwright.ir import Size, Value

DOMAIN = "com.microsoft"

BLOCKED_LAYOUT = "AveragePool Conv GlobalAveragePool GlobalMaxPool MaxPool ReorderInput "
BLOCKED_LAYOUT += "ReorderOutput Upsample"
_REASONS = {
    "it runs a whole generation loop; export the decoder alone": (
        "BeamSearch GreedySearch Sampling WhisperBeamSearch"
    ),
    "its operands are laid out for one GPU kernel": (
        "NhwcConv QOrderedAttention QOrderedGelu QOrderedLayerNormalization QOrderedMatMul "
        "QOrderedLongformerAttention QuantizeWithOrder DequantizeWithOrder"
    ),
    "it holds code compiled for one device": "EPContext Snpe",
    "it compares token suffixes, which no tensor op does": "BifurcationDetector",
    "its search through the data is sequential": "DynamicTimeWarping",
    "attention over a block-sparse layout has no op here": "SparseAttention",
    "attention over a sliding window with global tokens has no op here": "LongformerAttention",
    "caches in pages have no op here": "PagedAttention",
    "batches packed without padding have no op here": (
        "PackedAttention PackedMultiHeadAttention RemovePadding RestorePadding"
    ),
    "its weights are in a format private to ONNX Runtime": "MatMulFpQ4",
    "its windows end at the first masked element, which no pooling here does": "MaxpoolWithMask",
    "sparse tensors are not supported": "SparseToDenseMatMul",
    "it works on text": "Tokenizer WordConvEmbedding",
    "hashing has no op here": "MurmurHash3",
}
REFUSED = {op_type: reason for reason, ops in _REASONS.items() for op_type in ops.split()}


def microsoft(
    *op_types: str, needs: int = 1, most: int | None = None, domain: str = DOMAIN
) -> Callable[[Mapping], Mapping]:
    """Register the importer of these ops; their first `needs` operands are required."""

    def register(function: Mapping) -> Mapping:
        @wraps(function)
        def checked(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
            if most is not None and len(inputs) > most:
                raise ImportModelError(
                    "has too many inputs", where=node.where, expected=most, found=len(inputs)
                )
            for index in range(needs):
                if inputs[index] is None:
                    raise ImportModelError(
                        f"input {index} is missing",
                        where=node.where,
                        expected=f"at least {needs} inputs",
                        found=len(inputs),
                    )
            return function(ctx, node, inputs)

        return imports(*op_types, domain=domain)(checked)

    return register


@microsoft(*REFUSED, needs=0)
def refused(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    raise UnsupportedError(f"is not supported: {REFUSED[node.op_type]}", where=node.where)


@microsoft(*BLOCKED_LAYOUT.split(), needs=0, domain=f"{DOMAIN}.nchwc")
def blocked_layout(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    raise UnsupportedError(
        "is not supported: its channels are in blocks as wide as one machine's registers",
        where=node.where,
        hint="Save the model at ORT_ENABLE_EXTENDED, which keeps the layout.",
    )


def standard(
    ctx: Context,
    node: OnnxNode,
    op_type: str,
    inputs: Sequence[Value | None],
    version: int,
    **attrs: Any,
) -> Results:
    """The results of a standard ONNX op with the attributes of this node and `attrs`."""
    own = node.proto
    proto = NodeProto(op_type=op_type, name=own.name, input=own.input, output=own.output)
    alike = replace(node, proto=proto, version=version, attrs={**node.attrs, **attrs})
    return all_mappings()["", op_type](ctx, alike, Inputs(inputs))


def single(results: Results) -> Value:
    """The first result, which must be present."""
    first = results if isinstance(results, Value) else results[0]
    assert first is not None
    return first


def required(node: OnnxNode, name: str) -> int:
    """A required integer attribute."""
    node.require(name)
    number: int = node.integer(name)
    return number


def refuse(node: OnnxNode, what: str) -> UnsupportedError:
    return UnsupportedError(f"is not supported: {what}", where=node.where)


def count_up(ctx: Context, size: Size, element: str, *holders: Value) -> Value:
    """0, 1, … below a size, which an input or an axis of a holder binds."""
    if ctx.usable([size]):
        return ctx.b.iota(length=size, dtype=element)
    length = ctx.vector([size], *holders)
    if length is None:
        raise UnmappedError(f"no operand binds the size {size}")
    steps = ctx.b.range(ctx.const(0), ctx.reshape(length, []), ctx.const(1))
    return ctx.cast(ctx.refine(steps, [size]), element)


def scalar(ctx: Context, x: Value | None) -> Value | None:
    """A one-element operand of any rank as a scalar."""
    return None if x is None else ctx.reshape(x, [])
