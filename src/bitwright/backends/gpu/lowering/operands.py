"""Operands and results of a fused region inside a kernel: loads, the expression, the store.

A matrix product or convolution inlines its region at its store:

    parts = split(region)                                   # lowering of the CPU: prologue and
    epilogue
    tail = Tail.of(ctx, region, parts.after, y)             # y: the view of the result
    body = f'''
    ... acc [BM, BN]; rows, row_mask [BM, 1]; columns, column_mask [1, BN]
    {tail.text("acc", At("rows", "columns", "row_mask", "column_mask"), indent=4)}
    '''
    pointers = {"a": ..., "b": ..., **tail.pointers}         # e0, e1, ... and the result `y`
    sizes    = (..., *tail.sizes)                            # their strides, and axis sizes if
    needed
    ctx.call(kernel, node, {"a": a, **tail.views}, {**sizes, **tail.values}, writes=("y",))

`rows` counts the elements of all axes before the last one, in row-major order of the result (pass
`order` for
NHWC, which is a permutation of the result's axes); `columns` the last axis. Operands broadcast
as in numpy. Axes that do not merge into one row axis are found by division of the row index.

The fields of `At` may be any expressions that broadcast to the tile; an empty mask means that all
exist. An
operand that is the same in all rows is loaded once per column, with the column mask only.
A row kernel (norm, softmax) uses `Head.of(...)` in the same way for its prologue: it loads the
operands and leaves the
computed tile in a variable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from bitwright.backends.cpu.codegen.expression import Expression
from bitwright.backends.cpu.lowering.region import Part, broadcast, collapse, part_after
from bitwright.backends.gpu.codegen.expression import as_stored, loaded, render, why_not_render
from bitwright.backends.gpu.lowering.context import GpuLowering, NoKernelError, RegionView
from bitwright.ir.dim import Size
from bitwright.ir.dtype import DType
from bitwright.ir.graph import Node
from bitwright.lir.buffer import View

SHOWN = "y_shown"


@dataclass(frozen=True)
class At:
    """Where a tile is: its rows and columns, and which of them exist."""

    row: str
    column: str
    row_mask: str = ""
    column_mask: str = ""
    flat: At | None = None
    """The same rows and columns as vectors [BM] and [BN]: what differs along one of them only is
    loaded as a vector, which costs no exchange between threads."""
    loads: Mapping[str, str] = field(default_factory=dict)
    """The expressions that load some operands, by name, in place of pointers."""

    def mask(self, rows: bool = True, columns: bool = True) -> str:
        """The mask of an access that moves along rows, columns or both; "" for none."""
        parts = [self.row_mask] * rows + [self.column_mask] * columns
        return " & ".join(f"({part})" for part in parts if part)


@dataclass(frozen=True)
class Tiles:
    """Views of one shape, read or written as tiles of rows × columns."""

    names: tuple[str, ...]
    grouped: tuple[View, ...]
    """With as few axes as possible; the last one is the column axis."""
    prefix: str
    element: DType | None = None
    """The type that memory is read and written as, if it is not that of the buffers."""

    @classmethod
    def of(cls, views: Mapping[str, View], prefix: str, element: DType | None = None) -> Tiles:
        grouped = collapse(list(views.values()), keep=1) if views else []
        return cls(tuple(views), tuple(grouped), prefix, element)

    @property
    def views(self) -> dict[str, View]:
        return dict(zip(self.names, self.grouped, strict=True))

    @property
    def pointers(self) -> dict[str, DType]:
        return {name: self.dtype(name) for name in self.names}

    def dtype(self, name: str) -> DType:
        return self.element or self.views[name].dtype

    @property
    def rank(self) -> int:
        return len(self.grouped[0].shape) if self.grouped else 1

    @property
    def values(self) -> dict[str, Size]:
        """Run-time sizes by name: strides that are not 0 or 1, and sizes of inner row axes."""
        found: dict[str, Size] = {}
        for name, view in self.views.items():
            for axis, stride in enumerate(view.strides):
                if not isinstance(stride, int) or stride not in (0, 1):
                    found[f"{name}_s{axis}"] = stride
        if self.grouped:
            shape = self.grouped[0].shape
            found |= {f"{self.prefix}_n{axis}": shape[axis] for axis in range(1, self.rank - 1)}
        return found

    @property
    def sizes(self) -> tuple[str, ...]:
        return tuple(self.values)

    def index_lines(self, row: str) -> list[str]:
        """Statements that compute the index of every row axis from the row."""
        axes = self.rank - 1
        if axes <= 1:
            return []
        lines = [f"{self.prefix}_left = {row}"]
        for axis in range(axes - 1, 0, -1):
            size = f"{self.prefix}_n{axis}"
            lines.append(f"{self.prefix}_i{axis} = {self.prefix}_left % {size}")
            lines.append(f"{self.prefix}_left = {self.prefix}_left // {size}")
        return [*lines, f"{self.prefix}_i0 = {self.prefix}_left"]

    def offset(self, name: str, row: str, column: str) -> str:
        """The offset of a tile's elements in elements; "0" for a single element."""
        view = self.views[name]
        axes = self.rank - 1
        indices = [row] if axes == 1 else [f"{self.prefix}_i{axis}" for axis in range(axes)]
        terms = []
        for axis, (index, stride) in enumerate(zip([*indices, column], view.strides, strict=True)):
            if isinstance(stride, int) and stride in (0, 1):
                terms += [f"({index})"] if stride else []
            elif axis == axes and not column.isdigit() and is_far(view.shape[axis], stride):
                terms.append(f"({index}).to(tl.int64) * {name}_s{axis}")
            else:
                terms.append(f"({index}) * {name}_s{axis}")
        return " + ".join(terms) or "0"

    def moves(self, name: str) -> tuple[bool, bool]:
        """Whether an operand differs between rows, and between columns."""
        strides = self.views[name].strides
        return any(s != 0 for s in strides[:-1]), strides[-1] != 0

    def load(self, name: str, at: At) -> str:
        """The expression that loads a tile in its computed type. Repeated axes are loaded once."""
        rows, columns = self.moves(name)
        dtype = self.dtype(name)
        if name in at.loads:
            return loaded(at.loads[name], dtype)
        if not rows and not columns:
            return loaded(f"tl.load({name})", dtype)
        shape = ""
        if at.flat is not None and (not rows or (not columns and self.rank == 2)):
            at, shape = at.flat, "[:, None]" if rows else "[None, :]"
        where, mask = f"{name} + {self.offset(name, at.row, at.column)}", at.mask(rows, columns)
        other = "0.0" if dtype.is_float else "0"
        text = f"tl.load({where}, {mask}, other={other})" if mask else f"tl.load({where})"
        return f"{loaded(text, dtype)}{shape}"

    def store(self, name: str, value: str, at: At) -> str:
        """The statement that stores a computed tile."""
        where = f"{name} + {self.offset(name, at.row, at.column)}"
        # axes that do not move the address give it the tile's shape
        moves = zip((at.row, at.column), self.moves(name), strict=True)
        where += "".join(f" + ({index}) * 0" for index, moved in moves if not moved)
        mask = f", {at.mask()}" if at.mask() else ""
        return f"tl.store({where}, {as_stored(value, self.dtype(name))}{mask})"


def is_far(size: Size, stride: Size) -> bool:
    """Whether offsets on an axis may need more than 32 bits."""
    if not isinstance(size, int) or not isinstance(stride, int):
        return True
    return size * abs(stride) >= 2**31


def indented(lines: Sequence[str], indent: int) -> str:
    """Lines of a body; the first is not indented, because it stands where the text is inserted."""
    return ("\n" + " " * indent).join(lines)


@dataclass(frozen=True)
class Head:
    """A part of a region on loaded operands."""

    expression: Expression
    tiles: Tiles
    operands: tuple[str, ...]

    @classmethod
    def of(
        cls,
        ctx: GpuLowering,
        region: RegionView,
        part: Part,
        shape: Sequence[Size],
        order: Sequence[int] | None = None,
        prefix: str = "h",
        beside: Mapping[str, View] | None = None,
    ) -> Head:
        """`shape` is that of the part's result; `beside` are further views of this shape (in
        `order`)
        whose rows and columns are to be the same."""
        require_part(ctx, part)
        axes = tuple(order) if order is not None else tuple(range(len(shape)))
        names = {f"{prefix}{n}": value for n, value in enumerate(part.inputs)}
        views = {
            name: broadcast(ctx.view(region.outer(value)), shape).transpose(axes)
            for name, value in names.items()
        }
        views |= {name: view.transpose(axes) for name, view in (beside or {}).items()}
        views = {name: _with_columns(view) for name, view in views.items()}
        return cls(part.expression, Tiles.of(views, prefix), tuple(names))

    @property
    def pointers(self) -> dict[str, DType]:
        return self.tiles.pointers

    @property
    def views(self) -> dict[str, View]:
        return self.tiles.views

    @property
    def values(self) -> dict[str, Size]:
        return self.tiles.values

    @property
    def sizes(self) -> tuple[str, ...]:
        return self.tiles.sizes

    @property
    def is_identity(self) -> bool:
        return not self.expression.steps

    @property
    def dtype(self) -> DType:
        return self.expression.results[0]

    def lines(self, given: Sequence[str], at: At) -> tuple[list[str], list[str]]:
        """Statements that load the operands and compute the results, and the results' names."""
        prefix = self.tiles.prefix
        found = self.tiles.index_lines(at.row)
        for name in self.operands:
            found.append(f"{name}_x = {self.tiles.load(name, at)}")
        operands = [*given, *(f"{name}_x" for name in self.operands)]
        steps, results = render(self.expression, operands, f"{prefix}_v")
        return [*found, *steps], [term.text for term in results]


@dataclass(frozen=True)
class Tail(Head):
    """An epilogue and its store."""

    result: str = "y"
    shown: str = ""
    """A second result: a value of the epilogue that has other readers."""

    @classmethod
    def of_region(
        cls,
        ctx: GpuLowering,
        node: Node,
        region: RegionView,
        order: Sequence[int] | None = None,
    ) -> Tail:
        """The epilogue of a region, with outputs for all its results in the memory `order`."""
        views = [ctx.output(value, order) for value in node.outputs]
        beside = dict(zip(("y", SHOWN), views, strict=False))
        head = Head.of(ctx, region, part_after(region), views[0].shape, order, "e", beside)
        shown = SHOWN if len(views) > 1 else ""
        return cls(head.expression, head.tiles, head.operands, "y", shown)

    @property
    def results(self) -> tuple[str, ...]:
        return (self.result, self.shown) if self.shown else (self.result,)

    @classmethod
    def of(  # type: ignore[override]
        cls,
        ctx: GpuLowering,
        region: RegionView,
        part: Part,
        y: View,
        order: Sequence[int] | None = None,
        prefix: str = "e",
        result: str = "y",
    ) -> Tail:
        head = Head.of(ctx, region, part, y.shape, order, prefix, {result: y})
        return cls(head.expression, head.tiles, head.operands, result)

    def text(
        self, given: str, at: At, indent: int = 4, store: Callable[[str, str], str] | None = None
    ) -> str:
        """Statements that compute the epilogue of `given` (in its computed type) and store it, by
        the statement `store(result, value)` if given."""
        lines, (value, *others) = self.lines([given], at)
        lines += [self.tiles.store(self.shown, other, at) for other in others]
        if store is None:
            last = self.tiles.store(self.result, value, at)
        else:
            last = store(self.result, as_stored(value, self.tiles.dtype(self.result)))
        return indented([*lines, last], indent)


def require_part(ctx: GpuLowering, part: Part) -> None:
    """Raise a `NoKernelError` for a part without a Triton form."""
    ctx.require(*(value.dtype for value in part.inputs), part.dtype)
    if reason := why_not_render(part.expression):
        raise NoKernelError(reason)


def _with_columns(view: View) -> View:
    """A view with at least one axis."""
    return view if view.shape else View(view.buffer, view.offset, (1,), (1,))
