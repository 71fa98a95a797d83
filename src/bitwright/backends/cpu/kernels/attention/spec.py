"""Shared by the attention kernels: compile-time parameters, visible keys, key addresses.

`kernels.attention.attention` describes the kernel. Its slots:

    q k v y        strides `q.0` (batch), `q.1` (head), `q.2` (position); features are contiguous
    mask           strides `mask.0` … `mask.3`;  `limit`: the number of keys it covers
    past_k past_v  keys that precede k and v;    `past`: their number
    lengths        valid keys of each batch
    heads group queries keys offset              `offset`: position of the first query among keys
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bitwright.backends.cpu.codegen.emit import Kernel, Operand, Signature, Value
from bitwright.backends.cpu.codegen.emit.types import Type, computed, i64, storage_type
from bitwright.backends.cpu.codegen.expression import load_computed
from bitwright.backends.cpu.kernels.matmul.dot.amx import AmxBf16Dot
from bitwright.backends.cpu.kernels.matmul.dot.half_dot import Bf16Dot2
from bitwright.backends.cpu.kernels.parameters import KernelParameters
from bitwright.backends.cpu.lowering.region import ONE, RUN, Part, Reads, address_of, gather
from bitwright.ir.dtype import DType, bool_
from bitwright.target import Target

NO_MASK, KEY_MASK, FULL_MASK = "none", "keys", "full"
"""A mask that depends on the key only is read as scalars; a full mask is transposed by blocks."""
SINGLE_QUERY, QUERY_BLOCK, BOTH = "single_query", "query_block", "both"


@dataclass(frozen=True)
class Attention(KernelParameters):
    element: DType
    features: int
    value_features: int
    scale: float
    causal: bool
    window: int | None
    window_right: int | None
    softcap: float
    mask: str
    mask_element: DType | None
    mask_column: str
    """How lanes along keys read the mask (`region.ONE`, `RUN` or `STEP`)."""
    has_past: bool
    has_lengths: bool
    paths: str
    """SINGLE_QUERY, QUERY_BLOCK, or BOTH if the number of queries is symbolic."""
    pairs: AmxBf16Dot | Bf16Dot2 | None
    """The bf16 product used in blocks of queries, if any."""
    after: Part
    extras: Reads

    @property
    def type(self) -> Type:
        return computed(self.element)

    @property
    def has_edges(self) -> bool:
        """Whether the visible keys depend on the query's position."""
        return self.causal or self.window is not None or self.window_right is not None

    @property
    def transposes_values(self) -> bool:
        """Whether the kernel reads transposed values (`kernels.attention.transposed_values`)."""
        return isinstance(self.pairs, AmxBf16Dot)

    @property
    def signature(self) -> Signature:
        tensors = ["q", "k", "v", "y", *("transposed_v",) * self.transposes_values]
        sizes = ["batches", "heads", "group", "queries", "keys", "offset"]
        pointers = list(tensors)
        if self.mask != NO_MASK:
            pointers.append("mask")
            sizes += ["limit", *(f"mask.{axis}" for axis in range(4))]
        if self.has_past:
            past = ["past_k", "past_v", *("transposed_past_v",) * self.transposes_values]
            tensors += past
            pointers += past
            sizes.append("past")
        if self.has_lengths:
            pointers.append("lengths")
        sizes += [f"{name}.{axis}" for name in tensors for axis in range(3)]
        pointers += self.extras.names
        return Signature(pointers, (*sizes, *self.extras.sizes))


@dataclass(frozen=True)
class Tiles:
    """Sizes of the blocks and register tiles on a target."""

    lanes: int
    vectors: int
    """Vectors of queries in a block."""
    keys: int
    """Keys in a tile of scores."""
    block: int
    """Keys in a block, a multiple of `keys`."""
    rows: int
    """Queries in a tile of results."""
    columns: int
    """Vectors of value features in a tile of results, at most."""

    @property
    def queries(self) -> int:
        return self.lanes * self.vectors


BLOCK_ELEMENTS = 8192
"""The largest block of values, which leaves cache space for the other blocks."""
TILE_ELEMENTS, MAX_STEPS = 8192, 4
"""The same for AMX tiles."""


def tiles(target: Target, kernel: Attention) -> Tiles:
    lanes = target.lanes(kernel.type.bits)
    wide = target.vector_registers >= 32
    if isinstance(kernel.pairs, AmxBf16Dot):
        step, features = kernel.pairs.group, max(kernel.features, kernel.value_features)
        block = step * max(1, min(MAX_STEPS, TILE_ELEMENTS // (step * features)))
        return Tiles(lanes, 2, 8, block, 0, 0)
    keys, most = (8, 8) if wide else (6, 12)
    fitting = BLOCK_ELEMENTS // (keys * max(kernel.features, kernel.value_features))
    block = keys * min(most, max(2, fitting))
    columns = min(-(-kernel.value_features // lanes), 4 if wide else 2)
    rows = 8 if wide and columns <= 2 else 4
    return Tiles(lanes, 2, keys, block, rows, columns)


@dataclass(frozen=True)
class WorkItem:
    """One work item: its first query and the range of visible keys."""

    batch: Value
    head: Value
    key_head: Value
    first: Value
    """The first query."""
    count: Value
    """The number of queries in the block."""
    position: Value
    """The position of the first query among the keys."""
    low: Value
    high: Value
    """The range of keys that any query of the block may see."""


@dataclass(frozen=True)
class Segment:
    """A contiguous run of keys: past or present."""

    k: Value
    v: Value
    k_step: Value
    v_step: Value
    start: Value
    """The index of its first key."""
    count: Value
    transposed: Value
    transposed_step: Value
    """Transposed values, if the kernel `transposes_values`."""


def work_item(f: Kernel, kernel: Attention, group: Value, first: Value, count: Value) -> WorkItem:
    """The work item for a block of queries of (batch, head) number `group`."""
    heads, queries = f.args.size("heads"), f.args.size("queries")
    batch, head = f.udiv(group, heads), f.urem(group, heads)
    high = f.args.size("keys")
    if kernel.has_past:
        high = high + f.args.size("past")
    position = f.args.size("offset")
    if kernel.has_lengths:
        length = f.load(i64, f.args.pointer("lengths"), batch)
        high, position = f.min(high, length), f.sub(length, queries)
    position = position + first
    low = f.const(i64, 0)
    last = position + count - 1
    if kernel.causal:
        high = f.min(high, last + 1)
    if kernel.window_right is not None:
        high = f.min(high, last + (kernel.window_right + 1))
    if kernel.window is not None:
        low = f.max(low, position - (kernel.window - 1))
    if kernel.mask != NO_MASK:
        high = f.min(high, f.args.size("limit"))
    key_head = f.udiv(head, f.args.size("group"))
    return WorkItem(batch, head, key_head, first, count, position, low, high)


def segment(f: Kernel, kernel: Attention, item: WorkItem, number: Value | None) -> Segment:
    """The present keys; with a number, the past (0) or present (1) keys."""
    index = (item.batch, item.key_head)
    type_ = storage_type(kernel.element)

    def run(prefix: str, start: Value, count: Value) -> Segment:
        k, v = f"{prefix}k", f"{prefix}v"
        transposed = f"transposed_{v}" if kernel.transposes_values else v
        places = [address_of(f, name, type_, index) for name in (k, v, transposed)]
        strides = [f.args.size(f"{name}.2") for name in (k, v, transposed)]
        return Segment(
            places[0], places[1], strides[0], strides[1], start, count, places[2], strides[2]
        )

    zero, keys = f.const(i64, 0), f.args.size("keys")
    if number is None:
        return run("", zero, keys)
    length = f.args.size("past")
    old, new = run("past_", zero, length), run("", length, keys)
    is_past = f.eq(number, 0)
    fields = (field.name for field in dataclasses.fields(Segment))
    merged = {n: f.select(is_past, getattr(old, n), getattr(new, n)) for n in fields}
    return Segment(**merged)


def segments(
    f: Kernel, kernel: Attention, item: WorkItem, carry: Sequence[Value], body: Any
) -> tuple[Value, ...]:
    """Emit `body(segment, *carried) -> carried` for each segment."""
    if not kernel.has_past:
        return tuple(body(segment(f, kernel, item, None), *carry))
    with f.loop(0, 2, carry=carry, nonempty=True) as loop:
        loop.next(*body(segment(f, kernel, item, loop.index), *loop.carried))
    return loop.results


def visible(f: Kernel, kernel: Attention, positions: Value, key: Operand, type_: Type) -> Value:
    """Lane by lane, whether a query at a position sees a key; the kernel has edges."""
    seen: list[Value] = []
    key = f.as_value(key, type_)
    if kernel.causal:
        seen.append(f.le(key, positions))
    if kernel.window is not None:
        seen.append(f.gt(key, f.sub(positions, kernel.window)))
    if kernel.window_right is not None:
        seen.append(f.le(key, f.add(positions, kernel.window_right)))
    return f.combine(seen, f.and_)


def mask_bias(
    f: Kernel,
    kernel: Attention,
    index: Sequence[Operand],
    key: Value,
    lanes: int,
    inside: Value | None,
) -> Value:
    """The additive bias of the mask for keys key, key + 1, … of a query."""
    element = kernel.mask_element
    assert element is not None
    row = address_of(f, "mask", storage_type(element), index)
    if kernel.mask_column == ONE:
        found = f.splat(load_computed(f, element, 1, row), lanes)
    elif kernel.mask_column == RUN:
        found = load_computed(f, element, lanes, row, key, mask=inside)
    else:
        found = gather(f, element, lanes, row, key, f.args.size("mask.3"), inside)
    if element == bool_:
        return f.select(found, 0.0, f.const(kernel.type.vector(lanes), -math.inf))
    return f.convert(found, kernel.type, element.is_signed)


def max_single_queries(target: Target, element: DType) -> int:
    """The most queries that are processed one by one: lanes along queries would be mostly empty."""
    return max(1, target.lanes(computed(element).bits) // 4)
