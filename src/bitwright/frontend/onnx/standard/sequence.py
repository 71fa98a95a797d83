"""Sequence ops, resolved at import where the elements of the sequence are known.

A sequence is a value of interpreter fallbacks. For a sequence that is built from tensors the
importer records the elements, so that indexing, concatenation and length need no fallback. A
fallback whose result is not read is removed with the dead nodes.
"""

from __future__ import annotations

from bitwright.errors import ImportModelError
from bitwright.frontend.onnx.api import Context, Inputs, OnnxNode, Results, UnmappedError, imports
from bitwright.frontend.onnx.standard.shape import split_by
from bitwright.ir import Size, TensorType, Value
from bitwright.ir.types import normalize_axis

MAX_PARTS = 4096


def _record(ctx: Context, node: OnnxNode, inputs: Inputs, elements: list[Value]) -> Results:
    sequence = ctx.fallback(node, inputs)[0]
    if sequence is None:  # the output is absent
        return [None]
    ctx.importer.sequences[sequence] = elements
    return sequence


def _elements(ctx: Context, sequence: Value) -> list[Value]:
    found = ctx.importer.sequences.get(sequence)
    if found is None:
        raise UnmappedError(f"the elements of {sequence} are not known")
    return found


def _position(ctx: Context, node: OnnxNode, index: Value, count: int) -> int:
    (place,) = ctx.need_ints(index, "the position")
    if not -count <= place < count:
        raise ImportModelError(
            f"position {place} is outside a sequence of {count}", where=node.where
        )
    return place % count


@imports("SequenceEmpty")
def sequence_empty(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    return _record(ctx, node, inputs, [])


@imports("SequenceConstruct")
def sequence_construct(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    return _record(ctx, node, inputs, list(inputs))


@imports("SequenceInsert")
def sequence_insert(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    sequence, x, index = inputs[0], inputs[1], inputs[2]
    elements = list(_elements(ctx, sequence))
    place = len(elements)
    if index is not None:
        (place,) = ctx.need_ints(index, "the position")
    elements.insert(place, x)
    return _record(ctx, node, inputs, elements)


@imports("SequenceErase")
def sequence_erase(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    elements = list(_elements(ctx, inputs[0]))
    count = len(elements)
    del elements[count - 1 if inputs[1] is None else _position(ctx, node, inputs[1], count)]
    return _record(ctx, node, inputs, elements)


@imports("SequenceAt")
def sequence_at(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    sequence, index = inputs
    elements = _elements(ctx, sequence)
    return elements[_position(ctx, node, index, len(elements))]


@imports("SequenceLength")
def sequence_length(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    return ctx.const(len(_elements(ctx, inputs[0])))


@imports("ConcatFromSequence")
def concat_from_sequence(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    elements = _elements(ctx, inputs[0])
    if not elements or not all(isinstance(x.type, TensorType) for x in elements):
        raise UnmappedError("the elements are not all tensors")
    axis = node.require("axis")
    if node.flag("new_axis"):
        elements = [ctx.unsqueeze(x, [axis]) for x in elements]
    return ctx.b.concat(*elements, axis=axis)


@imports("SplitToSequence")
def split_to_sequence(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, split = inputs[0], inputs[1]
    axis = normalize_axis(node.integer("axis", 0), x.rank)
    if split is not None and split.rank == 1 and ctx.sizes(split) is None:
        count = _bounded(ctx.length(split))
        return _record(ctx, node, inputs, split_by(ctx, x, split, axis, count))
    sizes = _parts(ctx, x.shape[axis], split, ctx.length(x, axis) if split is None else None)
    parts = list(ctx.b.node("split", [x], {"axis": axis, "sizes": sizes}, []).outputs)
    if split is None and not node.flag("keepdims", 1):
        parts = [ctx.squeeze(part, [axis]) for part in parts]
    return _record(ctx, node, inputs, parts)


def _bounded(count: int) -> int:
    if count > MAX_PARTS:
        raise UnmappedError(f"a sequence of {count} parts is too long")
    return count


def _parts(ctx: Context, length: Size, split: Value | None, single: int | None) -> tuple[Size, ...]:
    """The sizes of the parts: given, equal except the last, or all 1."""
    if split is None:
        return (1,) * _bounded(single or 0)
    sizes = ctx.sizes(split)
    if sizes is None:
        raise UnmappedError(f"the sizes {split} are computed from data")
    if split.rank == 1:
        return sizes
    (chunk,) = sizes
    if not isinstance(length, int) or not isinstance(chunk, int) or chunk < 1:
        raise UnmappedError("the number of parts is not known")
    whole, rest = divmod(length, chunk)
    _bounded(whole)
    return (chunk,) * whole + ((rest,) if rest else ())
