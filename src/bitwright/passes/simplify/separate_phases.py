"""Transposed convolutions become convolutions of all phases, which are then interleaved.

With stride s, output o reads the taps r, r + s, r + 2s, … where r = (o + begin) mod s is its phase.
One convolution computes all phases, each in its own channels; missing taps of a phase are 0:

    z[q, (r, m)] = Σ_j x[q - j] w[m, r + j s]        y[q s + r - begin, m] = z[q, (r, m)]

Float kernels separate phases themselves; the pass serves quantization, which handles convolutions
only. Elementwise functions move in front of the interleaving, into the convolution's epilogue.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from bitwright.ir.dtype import f32
from bitwright.ir.graph import Graph, Node, Value, constant_value
from bitwright.ir.naming import made_from
from bitwright.rewrite import Match, Rule, Trace, any_operands, rewrite

Array = np.ndarray[Any, Any]
MAX_GROWTH = 2.0
"""The limit of the filter's growth by taps that are 0."""
_FUNCTIONS = (
    "relu", "leaky_relu", "sigmoid", "tanh", "silu", "gelu", "hard_swish", "hard_sigmoid",
)  # fmt: skip
_MOVES = ("transpose", "reshape", "slice")


def separate_phases(graph: Graph, trace: Trace) -> Graph:
    return rewrite(graph, RULES, trace)


@dataclass(frozen=True)
class _Axis:
    """One spatial axis of a transposed convolution."""

    taps: int
    stride: int
    begin: int
    end: int
    more: int
    """Outputs that are added at the end (`output_padding`)."""

    @property
    def count(self) -> int:
        """The number of taps per phase."""
        return -(-self.taps // self.stride)

    @property
    def of_one(self) -> int:
        """Outputs for an image of one element."""
        return self.taps - self.begin - self.end + self.more

    @property
    def pads(self) -> tuple[int, int]:
        """Padding of x with which the convolution computes every q that an output needs."""
        right = (self.taps - 1 - self.end + self.more) // self.stride
        return self.count - 1 - self.begin // self.stride, right


def _axes(node: Node) -> list[_Axis]:
    taps = node.inputs[1].shape[2:]  # type: ignore[union-attr]
    rank = len(taps)
    pads = node.attrs.get("pads") or (0,) * (2 * rank)
    strides = node.attrs.get("strides") or (1,) * rank
    more = node.attrs.get("output_padding") or (0,) * rank
    return [_Axis(*n) for n in zip(taps, strides, pads[:rank], pads[rank:], more, strict=True)]


def _why_not_phases(m: Match) -> str:
    node = m.root
    x, w, bias = (*node.inputs, None)[:3]
    assert x is not None and w is not None
    if constant_value(w) is None or w.dtype != f32 or x.rank not in (3, 4):
        return "it is not a constant 1-d or 2-d filter"
    if bias is not None and constant_value(bias) is None:
        return "its bias is not a constant"
    if node.attrs["groups"] != 1 or set(node.attrs.get("dilations") or (1,)) != {1}:
        return "it has groups or dilations"
    pads = node.attrs.get("pads") or ()
    if not all(isinstance(pad, int) for pad in pads):
        return "its padding has no known size"
    axes = _axes(node)
    is_open = not all(isinstance(size, int) for size in x.shape[2:])
    if is_open and min(axis.of_one for axis in axes) < 1:
        return "the output of a small image may be empty"
    if min(pad for axis in axes for pad in axis.pads) < 0 or 0 in w.shape:
        return "its padding exceeds its filter"
    growth = math.prod(axis.count * axis.stride / axis.taps for axis in axes)
    if growth > MAX_GROWTH:
        return f"its filter would have {growth:.1f} times as many taps"
    return ""


def _phases(op: Any, m: Match) -> Any:
    node = m.root
    x, w, bias = (*node.inputs, None)[:3]
    assert x is not None and w is not None
    axes = _axes(node)
    array = constant_value(w)
    assert array is not None
    filters = _filters(array, axes)
    phases = math.prod(axis.stride for axis in axes)
    known = None if bias is None else constant_value(bias)
    added = None if known is None else op.constant(np.tile(known, phases))
    pads = [axis.pads[side] for side in (0, 1) for axis in axes]
    with op.at(made_from(op.loc, [w])):
        taps = op.constant(filters)
    y = op.conv(x, taps, added, pads=tuple(pads))
    rank = len(axes)
    images, _, *counts = y.shape
    strides = [axis.stride for axis in axes]
    y = op.transpose(y, perm=(0, *range(2, rank + 2), 1))
    y = op.reshape(y, shape=(images, *counts, *strides, w.shape[1]))
    pairs = [place for axis in range(rank) for place in (1 + axis, 1 + rank + axis)]
    y = op.transpose(y, perm=(0, *pairs, 1 + 2 * rank))
    sizes = [count * stride for count, stride in zip(counts, strides, strict=True)]
    y = op.reshape(y, shape=(images, *sizes, w.shape[1]))
    y = op.transpose(y, perm=(0, rank + 1, *range(1, rank + 1)))
    wanted = node.outputs[0].shape[2:]
    if tuple(sizes) == wanted:
        return y
    starts = [axis.begin % axis.stride for axis in axes]
    stops = [start + size for start, size in zip(starts, wanted, strict=True)]
    places = tuple(range(2, rank + 2))
    return op.slice(y, starts=tuple(starts), stops=tuple(stops), axes=places, steps=(1,) * rank)


def _filters(w: Array, axes: list[_Axis]) -> Array:
    """w[in, out, taps …] as [phases · out, in, taps per phase …], the last tap first."""
    inner, outer = w.shape[:2]
    whole = [axis.count * axis.stride for axis in axes]
    filled = np.zeros((inner, outer, *whole), w.dtype)
    filled[(slice(None), slice(None), *(slice(axis.taps) for axis in axes))] = w
    cut = filled.reshape(inner, outer, *(n for a in axes for n in (a.count, a.stride)))
    rank = len(axes)
    counts, strides = range(2, 2 + 2 * rank, 2), range(3, 3 + 2 * rank, 2)
    found = np.flip(cut, tuple(counts)).transpose(*strides, 1, 0, *counts)
    shape = (math.prod(axis.stride for axis in axes) * outer, inner, *(a.count for a in axes))
    return np.ascontiguousarray(found.reshape(shape))


def _interleaving(m: Match) -> list[Node] | str:
    """The nodes between the convolution of all phases and a function, the last one first."""
    value: Value | None = next(iter(m.root.operands))
    found: list[Node] = []
    while value is not None and value.node.op in _MOVES and m.uses(value) == 1:
        found.append(value.node)
        value = value.node.inputs[0]
    is_ours = value is not None and value.node.op == "conv" and m.uses(value) == 1
    has_phases = sum(node.op == "reshape" for node in found) == 2
    return found if is_ours and has_phases else "it does not read the phases of a convolution"


def _function_first(op: Any, m: Match, found: list[Node]) -> Any:
    y = op.like(m.root, found[-1].inputs[0])
    for node in reversed(found):
        y = op.like(node, y, *node.inputs[1:])
    return y


RULES = [
    Rule("phases-of-conv-transpose", lambda op: op.conv_transpose(...), _phases, _why_not_phases),
    *(
        Rule.from_plan(
            f"{name}-before-phases".replace("_", "-"),
            any_operands(name),
            _interleaving,
            _function_first,
        )
        for name in _FUNCTIONS
    ),
]
