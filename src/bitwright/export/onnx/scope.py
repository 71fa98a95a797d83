"""The interface of mappings: one ONNX graph (the model's, or a body's) under construction.

    def silu(e, x):
        return e.Mul(x, e.Sigmoid(x))

`e.Name(operands, attribute=…)` appends an ONNX node and returns its value, after a check against
the schema of the target opset. Values are named after the mapping has returned, so the last node of
a decomposition has the name of the bitwright value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bitwright.errors import ExportError
from bitwright.export.onnx.options import Options
from bitwright.export.onnx.schemas import (
    READ_OPSET,
    Schema,
    least_opset_for_type,
    schema_at,
    spelled,
    versions_of,
)
from bitwright.export.onnx.tensors import byte_length
from bitwright.frontend.onnx.regions import SMALL as REGION_SMALL
from bitwright.ir import Graph, Node, OpaqueType, Shape, Size, TensorType, Value, ValueType
from bitwright.ir.dtype import DType, dtype, i64
from bitwright.ir.verify import place

Array = np.ndarray[Any, Any]
SMALL = 4096
"""Equal constants of decompositions up to this many bytes are shared."""


class NeedsOpset(Exception):  # noqa: N818 - control flow, not an error
    """The current node has no form below this opset."""

    def __init__(self, opset: int, reason: str) -> None:
        super().__init__(reason)
        self.opset, self.reason = opset, reason


class NoSuchType(Exception):  # noqa: N818 - control flow, not an error
    """No current opset takes the types; a wider type or `opset` may."""

    def __init__(self, reason: str, opset: int | None) -> None:
        super().__init__(reason)
        self.opset = opset


@dataclass(eq=False)
class Ref:
    """A value of the ONNX graph, named after its node is complete."""

    dtype: DType | None
    name: str = ""
    type: ValueType | None = None

    @property
    def shape(self) -> Shape:
        """The shape of a value with a known type."""
        assert isinstance(self.type, TensorType)
        return self.type.shape

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def spelled(self) -> str:
        return spelled(self.dtype or self.type)

    @property
    def element(self) -> DType:
        assert self.dtype is not None
        return self.dtype


@dataclass(eq=False)
class Step:
    """One ONNX node before it becomes a proto."""

    op_type: str
    inputs: list[Ref | None]
    outputs: list[Ref]
    attrs: dict[str, Any]
    domain: str = ""
    name: str = ""
    proto: Any = None
    """The original node of an interpreter fallback; inputs and outputs replace its own."""


@dataclass(frozen=True, eq=False)
class RegionRecord:
    """The inputs and outputs of nodes that implement one op."""

    op: str
    attrs: dict[str, Any]
    operands: list[Ref | None]
    reads: list[Ref]
    """Values that the region reads and that are not operands of the op."""
    outputs: list[Ref]


@dataclass
class Session:
    """The state that all scopes of one model share."""

    opset: int
    options: Options
    names: dict[str, int] = field(default_factory=dict)
    domains: dict[str, int] = field(default_factory=dict)
    functions: dict[tuple[Any, ...], Function] = field(default_factory=dict)
    regions: list[RegionRecord] = field(default_factory=list)
    records_regions: bool = False
    """Whether every op that takes several nodes is recorded as a region."""

    def unique(self, hint: str) -> str:
        """`hint`, or `hint_1`, `hint_2`, … if it is taken."""
        name, count = hint, self.names.get(hint, 0)
        while not name or name in self.names:
            count += 1
            name = f"{hint or 'value'}_{count}"
        self.names[hint] = count
        self.names.setdefault(name, 0)
        return name


@dataclass(eq=False)
class Function:
    """A model-local function: a body of standard ops with the name of a bitwright op."""

    op: str
    name: str
    attributes: tuple[str, ...]
    inputs: list[Ref]
    outputs: list[Ref]
    body: Scope


class Scope:
    """One graph being written."""

    def __init__(self, session: Session, graph: Graph, parent: Scope | None = None) -> None:
        self.session, self.graph, self.parent = session, graph, parent
        self.node: Node | None = parent.node if parent else None
        self.values: dict[Value, Ref] = {}
        self.steps: list[Step] = []
        self.initializers: dict[Ref, Array] = {}
        self.sizes_known: dict[Size, Ref] = {}
        self.shapes_known: dict[Ref, Ref] = {}
        self.bindings: dict[str, tuple[Ref, int, Size]] = {}
        self._shared: dict[tuple[Any, ...], Ref] = {}

    @property
    def opset(self) -> int:
        return self.session.opset

    @property
    def where(self) -> str:
        return place(self.graph, self.node) if self.node else f"graph {self.graph.name!r}"

    def reject(self, reason: str, hint: str = "") -> ExportError:
        """An error with the reason why the current node has no ONNX form."""
        op = self.node.op if self.node else self.graph.name
        return ExportError(f"{op} has no form in ONNX: {reason}", where=self.where, hint=hint)

    def needs(self, opset: int, reason: str) -> None:
        """Raise if the current node has no form in the target opset."""
        if self.opset < opset:
            raise NeedsOpset(opset, reason)

    # nodes

    def __getattr__(self, name: str) -> Callable[..., Ref]:
        if not name[0].isupper():
            raise AttributeError(name)
        return lambda *inputs, **attrs: self.emit(name, inputs, attrs)[0]

    def emit(
        self,
        op_type: str,
        inputs: Sequence[Ref | None],
        attrs: dict[str, Any] | None = None,
        results: int = 1,
        dtypes: Sequence[DType | OpaqueType] = (),
    ) -> tuple[Ref, ...]:
        """Append a standard node; `dtypes` if the operands do not determine the result types."""
        operands = list(inputs)
        while operands and operands[-1] is None:
            operands.pop()
        attrs = {name: value for name, value in (attrs or {}).items() if value is not None}
        given: Sequence[DType | OpaqueType] = attrs.pop("dtypes", dtypes)
        elements = [None if ref is None else ref.dtype for ref in operands]
        schema = self._schema(op_type, operands, list(attrs), list(map(spelled, given)))
        refs = []
        for i in range(results):
            result = given[i] if i < len(given) else schema.result(elements, i)
            refs.append(Ref(None, type=result) if isinstance(result, OpaqueType) else Ref(result))
        self.steps.append(Step(op_type, operands, refs, attrs))
        return tuple(refs)

    def fits(self, op_type: str, inputs: Sequence[Ref | None], attrs: Iterable[str] = ()) -> bool:
        """Whether the target opset has this op for these operands."""
        schema = schema_at(op_type, self.opset)
        elements = ["" if ref is None else ref.spelled for ref in inputs]
        return schema is not None and not schema.misfit(elements, attrs)

    def _schema(
        self, op_type: str, operands: Sequence[Ref | None], attrs: list[str], results: list[str]
    ) -> Schema:
        elements = ["" if ref is None else ref.spelled for ref in operands]
        schema = schema_at(op_type, self.opset)
        reason = schema.misfit(elements, attrs, results) if schema else "does not exist"
        if schema and not reason:
            return schema
        is_type = reason.startswith("takes no ")
        later = next(
            (
                version.since
                for version in versions_of(op_type)
                if version.since > self.opset
                and not version.deprecated
                and not version.misfit(elements, attrs, results)
            ),
            None,
        )
        if later is not None and (later <= READ_OPSET or not is_type):
            raise NeedsOpset(later, f"ONNX {op_type} {reason} before")
        if not schema:
            raise self.reject(f"the installed onnx has no usable op {op_type}")
        if is_type:
            raise NoSuchType(f"ONNX {op_type} {reason}", later)
        raise self.reject(f"ONNX {op_type} {reason}")

    def cast(self, x: Ref, to: DType) -> Ref:
        """The value in another element type, without saturation."""
        if x.dtype == to:
            return x
        narrow_float = to.is_float and to.bits == 8 and to.name != "f8e8m0"
        attrs = {"to": to, "saturate": 0 if narrow_float else None}
        (y,) = self.emit("Cast", [x], attrs, dtypes=[to])
        y.type = x.type.with_dtype(to) if isinstance(x.type, TensorType) else x.type
        return y

    # constants

    def constant(self, array: Any, element: DType | None = None) -> Ref:
        """A constant of the mapping."""
        array = np.asarray(array) if element is None else np.asarray(array).astype(element.numpy)
        key = (array.dtype, array.shape, array.tobytes()) if array.nbytes <= SMALL else None
        scope: Scope | None = self
        while scope and key:
            if key in scope._shared:
                return scope._shared[key]
            scope = scope.parent
        found = dtype(array.dtype)
        self.check_type(found)
        ref = Ref(found, type=TensorType(found, array.shape))
        self.initializers[ref] = array
        if key:
            self._shared[key] = ref
        return ref

    def is_small(self, ref: Ref) -> bool:
        """Whether a value is a constant that region digests include."""
        scope: Scope | None = self
        while scope is not None:
            if ref in scope.initializers:
                return 0 < byte_length(scope.initializers[ref]) < REGION_SMALL
            scope = scope.parent
        return False

    def scalar(self, value: float | np.floating[Any], like: Ref) -> Ref:
        """A scalar constant in the element type of another value."""
        return self.constant(np.asarray(value), like.element)

    def ints(self, values: Sequence[int]) -> Ref:
        return self.constant(np.asarray(values, np.int64).reshape(len(values)), i64)

    def check_type(self, element: DType) -> None:
        self.needs(least_opset_for_type(element), f"ONNX has no {element} before")

    # undo: a decomposition with an unsupported type is repeated with wider operands

    @property
    def _caches(self) -> tuple[dict[Any, Any], ...]:
        return (self.initializers, self.sizes_known, self.shapes_known, self._shared)

    def mark(self) -> tuple[int, ...]:
        return (len(self.steps), len(self.session.regions), *map(len, self._caches))

    def undo(self, mark: tuple[int, ...]) -> None:
        """Remove everything written after `mark`."""
        del self.steps[mark[0] :]
        del self.session.regions[mark[1] :]
        for cache, length in zip(self._caches, mark[2:], strict=True):
            while len(cache) > length:
                cache.popitem()
