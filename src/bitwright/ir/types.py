"""Types of values: tensors with possibly symbolic shapes, and opaque values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from bitwright.errors import GraphError
from bitwright.ir.dim import UNKNOWN, Dim, Size, Symbol, broadcast_size, evaluate, product
from bitwright.ir.dtype import DType
from bitwright.ir.substitute import substitute

Shape = tuple[Size, ...]


@dataclass(frozen=True)
class TensorType:
    dtype: DType
    shape: Shape

    def __post_init__(self) -> None:
        for size in self.shape:
            if not isinstance(size, Dim) and size < 0:
                raise GraphError(f"a tensor cannot have the negative size {size}")

    @cached_property
    def _hash(self) -> int:
        return hash((self.dtype, self.shape))

    def __hash__(self) -> int:
        return self._hash

    @property
    def rank(self) -> int:
        return len(self.shape)

    @cached_property
    def count(self) -> Size:
        """The number of elements."""
        return product(self.shape)

    @property
    def is_static(self) -> bool:
        return not any(isinstance(size, Dim) for size in self.shape)

    @cached_property
    def symbols(self) -> frozenset[Symbol]:
        return frozenset().union(*(size.symbols for size in self.shape if isinstance(size, Dim)))

    def with_dtype(self, dtype: DType) -> TensorType:
        return TensorType(dtype, self.shape)

    def with_shape(self, shape: Iterable[Size]) -> TensorType:
        return TensorType(self.dtype, tuple(shape))

    def concrete(self, bindings: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(evaluate(size, bindings) for size in self.shape)

    def substitute(self, values: Mapping[str, Size]) -> TensorType:
        return self.with_shape(substitute(size, values) for size in self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"

    __repr__ = __str__


@dataclass(frozen=True)
class OpaqueType:
    """A value that only the interpreter fallback holds: a sequence, an optional, a tensor of
    unknown rank."""

    kind: str

    @property
    def symbols(self) -> frozenset[Symbol]:
        return frozenset()

    def __str__(self) -> str:
        return f"host<{self.kind}>"

    __repr__ = __str__


ValueType = TensorType | OpaqueType


def broadcast_shapes(*shapes: Shape) -> Shape:
    """The shape after numpy broadcasting; sizes may be symbolic."""
    rank = max(map(len, shapes), default=0)
    result: list[Size] = [1] * rank
    for shape in shapes:
        for axis, size in enumerate(shape, rank - len(shape)):
            try:
                result[axis] = broadcast_size(result[axis], size)
            except GraphError:
                raise GraphError(
                    f"shapes {' and '.join(_show(s) for s in shapes)} do not broadcast",
                    expected=f"equal sizes or 1 on axis {axis - rank}",
                ) from None
    return tuple(result)


def _show(shape: Shape) -> str:
    return f"[{', '.join(map(str, shape))}]"


def compatible(inferred: ValueType, declared: ValueType) -> bool:
    """Whether a declared type agrees with the inferred one; an unknown size agrees with any."""
    if isinstance(inferred, OpaqueType) or isinstance(declared, OpaqueType):
        return isinstance(inferred, OpaqueType) and isinstance(declared, OpaqueType)
    return (
        inferred.dtype == declared.dtype
        and inferred.rank == declared.rank
        and all(a is UNKNOWN or a == b for a, b in zip(inferred.shape, declared.shape, strict=True))
    )


def normalize_axis(axis: int, rank: int) -> int:
    """The axis counted from the front; a `GraphError` if it is out of range."""
    if not -rank <= axis < rank:
        raise GraphError(f"axis {axis} is outside a tensor of rank {rank}")
    return axis % rank
