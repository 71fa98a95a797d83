"""Prologues and epilogues of kernels: the elementwise nodes of a fused region.

    parts = split(region)                    # before: the prologue; after: the epilogue
    views = operand_views(ctx, region, parts.after.inputs, shape)
    reads = Reads("e", views)                # slots of the kernel: address and strides per operand

During emission, for a vector of results at (…, row, column):

    at = reads.at(f, (row,), lanes)                         # once per row
    operands = at.load(column, mask)                        # with numpy broadcasting
    y = parts.after.evaluate(f, [accumulator, *operands], lanes)
    store(f, y, result, pointer, column, mask)

All views have the shape of the result, or of a regrouping of it (`collapse_rows`); a broadcast axis
has stride 0. Lanes run along the last axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bitwright.backends.cpu.codegen import emit
from bitwright.backends.cpu.codegen.emit import Function, Kernel, i64, storage_type
from bitwright.backends.cpu.codegen.expression import (
    Expression,
    from_stored,
    load_computed,
    to_stored,
)
from bitwright.backends.cpu.lowering.context import Lowering, NoKernelError, RegionView
from bitwright.errors import CompileError
from bitwright.ir.dim import Size, min_size, product
from bitwright.ir.dtype import DType
from bitwright.ir.graph import Graph, Node, Value
from bitwright.lir.buffer import View

# How lanes read an operand: one element for all lanes, consecutive elements, or strided ones.
ONE, RUN, STEP = "one", "run", "step"


@dataclass(frozen=True)
class Part:
    """A prologue or epilogue: an expression and the values of the body that it loads.

    The expression's inputs are the loaded values; those of an epilogue start with the anchor's
    result.
    """

    expression: Expression
    inputs: tuple[Value, ...]

    @property
    def is_empty(self) -> bool:
        """Whether the expression is the identity."""
        return not self.expression.steps

    @property
    def dtype(self) -> DType:
        return self.expression.results[0]

    def evaluate(self, f: Function, values: Sequence[emit.Value], lanes: int) -> emit.Value:
        """The result as a computed vector."""
        return self.expression.emit(f, values, lanes)[0]

    def evaluate_wide(self, f: Function, values: Sequence[emit.Value], lanes: int) -> emit.Value:
        """The quantized result (`Expression.narrows`) in i32, before saturation."""
        return self.expression.emit_wide(f, values, lanes)


@dataclass(frozen=True)
class Parts:
    before: Part
    """The prologue: computes the anchor's first operand."""
    after: Part
    """The epilogue: uses the anchor's result."""


def split(region: RegionView) -> Parts:
    """The prologue and epilogue of a region."""
    anchor = _anchor(region)
    source = anchor.outputs[0]
    if region.body is None:
        return Parts(part_before(region), _part((source,), (), source))
    before = _nodes_before(region)
    inner = (node for node in region.body.nodes if not node.is_boundary and node is not anchor)
    after = tuple(node for node in inner if node not in before)
    return Parts(part_before(region), _part((source,), after, region.body.outputs[0][1]))


def part_before(region: RegionView) -> Part:
    """The prologue of a region."""
    operand = _anchor(region).inputs[0]
    assert operand is not None
    return _part((), _nodes_before(region), operand)


def part_after(region: RegionView) -> Part:
    """The epilogue of a region, with all results of the region."""
    source = _anchor(region).outputs[0]
    if region.body is None:
        return _part((source,), (), source)
    before = _nodes_before(region)
    inner = (n for n in region.body.nodes if not n.is_boundary and n is not region.anchor)
    after = tuple(node for node in inner if node not in before)
    return _part((source,), after, *(value for _, value in region.body.outputs))


def _anchor(region: RegionView) -> Node:
    if region.anchor is None or region.anchor.inputs[0] is None:
        raise CompileError("a region without an anchor has no prologue or epilogue")
    return region.anchor


def _nodes_before(region: RegionView) -> tuple[Node, ...]:
    if region.body is None:
        return ()
    anchor = _anchor(region)
    inner = [node for node in region.body.nodes if not node.is_boundary and node is not anchor]
    needed = {anchor.inputs[0].node}  # type: ignore[union-attr]
    for node in reversed(inner):
        if node in needed:
            needed.update(value.node for value in node.operands)
    return tuple(node for node in inner if node in needed)


def part_between(region: RegionView, source: Value, result: Value) -> Part:
    """The expression that computes one value of an epilogue from another."""
    needed = {result.node} - {source.node}
    nodes = [] if region.body is None or not needed else list(region.body.nodes)
    for node in reversed(nodes):
        if node in needed:
            needed.update(value.node for value in node.operands if value is not source)
    chosen = tuple(n for n in nodes if n in needed and not n.is_boundary)
    return _part((source,), chosen, result)


def _part(given: tuple[Value, ...], nodes: tuple[Node, ...], *results: Value) -> Part:
    """The expression of nodes that compute `results`; it loads the operands they do not compute."""
    computed = {*given, *(value for node in nodes for value in node.outputs)}
    read = [v for node in nodes for v in node.operands if not _is_scalar(v)] + [*results]
    loaded = tuple(dict.fromkeys(v for v in read if v not in computed))
    inner: dict[Value, Value] = {}
    body: list[Node] = []
    for value in (*given, *loaded):
        body.append(Node("input", (), {}, (value.type,), (value.name,)))
        inner[value] = body[-1].outputs[0]
    for node in nodes:
        inputs = tuple(None if v is None else inner.get(v, v) for v in node.inputs)
        body.append(node.with_(inputs=inputs))
        inner.update(zip(node.outputs, body[-1].outputs, strict=True))
    names = ("result", *(f"result{number}" for number in range(1, len(results))))
    found = tuple((name, inner.get(v, v)) for name, v in zip(names, results, strict=True))
    graph = Graph("part", tuple(body), found)
    return Part(Expression.of(graph), loaded)


def _is_scalar(value: Value) -> bool:
    """Whether a value is a constant of one element, which is an immediate in the code."""
    return value.is_constant and value.node.attrs["value"].size == 1


# operands in memory


def require_elements(*elements: DType) -> None:
    """Raise a `NoKernelError` for element types without CPU support."""
    for element in elements:
        try:
            storage_type(element)
        except CompileError as error:
            raise NoKernelError(str(error)) from None


def broadcast(view: View, shape: Sequence[Size]) -> View:
    """The view broadcast to a larger shape, with numpy's rules.

    A symbolic size that may be 1 at run time gets a stride that is 0 in that case.
    """
    missing = len(shape) - len(view.shape)
    strides: list[Size] = [0] * missing
    for size, stride, whole in zip(view.shape, view.strides, shape[missing:], strict=True):
        if size == whole:
            strides.append(stride)
        else:
            strides.append(0 if size == 1 else stride * min_size(size - 1, 1))
    return replace(view, shape=tuple(shape), strides=tuple(strides))


def operand_views(
    ctx: Lowering, region: RegionView, values: Iterable[Value], shape: Sequence[Size]
) -> list[View]:
    """Views of a part's operands, broadcast to the shape of its result."""
    values = tuple(values)
    require_elements(*(value.dtype for value in values))
    return [broadcast(ctx.view(region.outer(value)), shape) for value in values]


def close(ctx: Lowering, value: Value) -> View:
    """A view of a value whose last axis has stride 1; copied if needed."""
    view = ctx.view(value)
    return view if view.strides[-1] == 1 or view.shape[-1] == 1 else ctx.contiguous(value)


def reshaped(ctx: Lowering, view: View, shape: Sequence[Size], name: str) -> View:
    """The view in another shape; copied if its strides do not allow it."""
    found = view.reshape(shape) or ctx.packed(view, name).reshape(shape)
    if found is None:
        raise NoKernelError(f"shape {list(view.shape)} cannot be reshaped to {list(shape)}")
    return found


def collapse(views: Sequence[View], keep: int = 0) -> list[View]:
    """The views with as few axes as possible, except for the last `keep` axes.

    Adjacent axes are merged if their strides are compatible in all views; axes of size 1 are
    removed.
    """
    shape = views[0].shape
    last = len(shape) - keep
    groups: list[list[int]] = []
    for axis in range(last):
        if shape[axis] == 1:
            continue
        if groups and all(_follows(view, groups[-1][-1], axis) for view in views):
            groups[-1].append(axis)
        else:
            groups.append([axis])
    groups += [[axis] for axis in range(last, len(shape))]
    return [_grouped(view, groups) for view in views]


def _follows(view: View, outer: int, inner: int) -> bool:
    return view.strides[outer] == view.strides[inner] * view.shape[inner]


def _grouped(view: View, groups: Sequence[Sequence[int]]) -> View:
    shape = tuple(product(view.shape[axis] for axis in group) for group in groups)
    return replace(view, shape=shape, strides=tuple(view.strides[group[-1]] for group in groups))


def collapse_rows(views: Sequence[View]) -> list[View]:
    """`collapse` that keeps the last axis and at least one axis of rows before it."""
    found = collapse(views, keep=1)
    if len(found[0].shape) > 1:
        return found
    return [replace(v, shape=(1, *v.shape), strides=(0, *v.strides)) for v in found]


class Reads:
    """Operands of the same shape as kernel slots: address and strides per operand."""

    def __init__(self, prefix: str, views: Sequence[View]) -> None:
        self.views = tuple(views)
        self.names = tuple(f"{prefix}{number}" for number in range(len(self.views)))
        self.columns = tuple(column_form(view) for view in self.views)
        self.moves = tuple(tuple(s != 0 for s in view.strides[:-1]) for view in self.views)
        self.rank = len(self.views[0].shape) if self.views else 0

    @property
    def key(self) -> tuple[Any, ...]:
        """Everything that determines the code that reads the operands."""
        return self.rank, tuple(view.dtype for view in self.views), self.columns, self.moves

    @property
    def pointers(self) -> dict[str, View]:
        return dict(zip(self.names, self.views, strict=True))

    @property
    def sizes(self) -> dict[str, Size]:
        """Strides by slot: `x0.0` is that of the first axis of operand x0, unless broadcast."""
        found: dict[str, Size] = {}
        for number, (name, view) in enumerate(zip(self.names, self.views, strict=True)):
            moves = (*self.moves[number], self.columns[number] == STEP)
            steps = enumerate(zip(view.strides, moves, strict=True))
            found.update({f"{name}.{axis}": stride for axis, (stride, moved) in steps if moved})
        return found

    def at(self, f: Kernel, index: Sequence[emit.Operand], lanes: int) -> Row:
        """The operands of one row; `index` has an index for every axis except the last."""
        addresses = []
        for name, view, moves in zip(self.names, self.views, self.moves, strict=True):
            indices = [i if moved else 0 for i, moved in zip(index, moves, strict=True)]
            addresses.append(address_of(f, name, storage_type(view.dtype), indices))
        return Row(self, f, addresses, lanes)


class Row:
    """The operands of one row; `load` reads them at a column."""

    def __init__(
        self, reads: Reads, f: Kernel, addresses: Sequence[emit.Value], lanes: int
    ) -> None:
        self._reads, self._f, self.lanes = reads, f, lanes
        self._addresses = tuple(addresses)
        self._fixed = {
            number: f.splat(load_computed(f, reads.views[number].dtype, 1, address), lanes)
            for number, address in enumerate(addresses)
            if reads.columns[number] == ONE
        }

    def load(self, column: emit.Operand, mask: emit.Value | None = None) -> list[emit.Value]:
        """The operands at columns column, column + 1, …; masked-out lanes are not read."""
        return [self._one(number, column, mask) for number in range(len(self._addresses))]

    def _one(self, number: int, column: emit.Operand, mask: emit.Value | None) -> emit.Value:
        if number in self._fixed:
            return self._fixed[number]
        f, reads = self._f, self._reads
        element, address = reads.views[number].dtype, self._addresses[number]
        if reads.columns[number] == RUN:
            return load_computed(f, element, self.lanes, address, column, mask=mask)
        stride = f.args.size(f"{reads.names[number]}.{reads.rank - 1}")
        return gather(f, element, self.lanes, address, column, stride, mask)


def address_of(f: Kernel, name: str, type_: emit.Type, index: Sequence[emit.Operand]) -> emit.Value:
    """The address of an element of slot `name`; its strides are the slots `name.0`, …"""
    offset: emit.Value | None = None
    for axis, position in enumerate(index):
        if not isinstance(position, emit.Value) and position == 0:
            continue
        moved = f.mul(position, f.args.size(f"{name}.{axis}"))
        offset = moved if offset is None else offset + moved
    pointer = f.args.pointer(name)
    return pointer if offset is None else f.gep(type_, pointer, offset)


def column_form(view: View) -> str:
    """How lanes along the last axis read a view: ONE, RUN or STEP."""
    if view.strides[-1] == 0 or view.shape[-1] == 1:
        return ONE
    return RUN if view.strides[-1] == 1 else STEP


def gather(
    f: Function,
    element: DType,
    lanes: int,
    pointer: emit.Value,
    index: emit.Operand,
    stride: emit.Value,
    mask: emit.Value | None = None,
) -> emit.Value:
    """Strided elements, converted to their compute type."""
    if lanes == 1:
        return load_computed(f, element, 1, pointer, f.mul(index, stride), mask=mask)
    indices = f.mul(f.add(f.iota(i64, lanes), f.splat(f.index(index), lanes)), stride)
    value = f.gather(storage_type(element).vector(lanes), pointer, indices, mask=mask)
    return from_stored(f, value, element)


def store(
    f: Function,
    value: emit.Value,
    element: DType,
    pointer: emit.Value,
    index: emit.Operand = 0,
    mask: emit.Value | None = None,
) -> None:
    """Convert computed elements to their storage type and write them."""
    f.store(to_stored(f, value, element), pointer, index, mask=mask)
