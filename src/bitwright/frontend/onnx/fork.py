"""Values whose rank only the run decides: what follows them is imported once for each case.

Values here have a rank; ONNX's need not. PyTorch writes `x.squeeze(1)` as

    y = If(size == 1) { Squeeze(x, 1) } else { Identity(x) }

A mapping that meets such a node raises `Fork`. The importer then makes one body per case out of the
branch and of everything that follows it in its scope, and an `if` chooses between them. Where what
follows has no valid types in one case, the model itself would fail there: the other case is then
put in place, and a `require` fails the run when the condition does not hold. A size that has been
compared with 1 is not compared again in what follows, and a model with many forks goes on with
values of open rank, which host steps compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from onnx import NodeProto

from bitwright.errors import ImportModelError, UnsupportedError
from bitwright.frontend.onnx.bodies import captures_of, finished
from bitwright.frontend.onnx.context import Body, Context
from bitwright.frontend.onnx.frame import Scope
from bitwright.frontend.onnx.node import OnnxNode
from bitwright.frontend.onnx.registry import UnmappedError
from bitwright.ir import Size, Value
from bitwright.ir.dim import UNKNOWN

if TYPE_CHECKING:
    from bitwright.frontend.onnx.importer import Importer

Branch = Callable[[Context], Sequence[Value]]
MAX_OPEN_AXES = 3
MAX_FORKS = 64


class Fork(Exception):  # noqa: N818 - a message to the importer, not an error
    """Raised by a mapping: the node's results have other ranks if the condition holds or not."""

    def __init__(
        self,
        node: OnnxNode,
        condition: Value,
        then: Branch,
        otherwise: Branch,
        checks_itself: bool = False,
        size: Size | None = None,
    ) -> None:
        super().__init__("the rank of a value is decided by the run")
        self.node, self.condition, self.branches = node, condition, (then, otherwise)
        self.checks_itself = checks_itself
        """Whether `then` fails on its own in a run where the condition does not hold."""
        self.size = size
        """The size that is 1 if the condition holds and not otherwise, if it says that."""


@dataclass(frozen=True)
class Tail:
    """A node, the nodes after it, and the names that are needed when all have been imported."""

    node: OnnxNode
    rest: Sequence[NodeProto]
    wanted: Sequence[str]

    @property
    def results(self) -> list[str]:
        """The needed names that are made from the node on."""
        made = {name for proto in (self.node.proto, *self.rest) for name in proto.output if name}
        return [name for name in dict.fromkeys(self.wanted) if name in made]


def join(importer: Importer, scope: Scope, fork: Fork, tail: Tail) -> None:
    """Import the tail for both cases; its results become values of the scope."""
    cases: list[Body | ImportModelError] = []
    importer.forks += 1
    for holds in (True, False):
        try:
            cases.append(_case(importer, scope, fork, tail, holds))
        except UnsupportedError:
            raise
        except ImportModelError as error:
            cases.append(error)
    then, otherwise = cases
    if isinstance(then, ImportModelError) and isinstance(otherwise, ImportModelError):
        raise then
    if isinstance(then, ImportModelError) or isinstance(otherwise, ImportModelError):
        _take(importer, scope, fork, tail, holds=isinstance(then, Body))
        return
    captures = captures_of([then, otherwise])
    attrs = {"then": finished(then, captures), "else": finished(otherwise, captures)}
    ctx = Context(importer, scope)
    operands = [ctx.reshape(fork.condition, []), *captures]
    values = ctx.b.node("if", operands, attrs, []).outputs
    for name, value in zip(tail.results, values, strict=True):
        scope.values[name] = value
        scope.frame.claim(value, name)


def _case(importer: Importer, scope: Scope, fork: Fork, tail: Tail, holds: bool) -> Body:
    inner = importer.nested_scope(scope, "case")
    inner.declared = scope.declared
    _suppose(inner, fork, holds)
    _branch(importer, inner, fork.branches[0 if holds else 1], tail)
    outputs = [(name, importer.output(inner, name)) for name in tail.results]
    return Body(inner.frame, [], outputs)


def _branch(importer: Importer, scope: Scope, branch: Branch, tail: Tail) -> None:
    try:
        results = branch(Context(importer, scope))
    except Fork as fork:
        join(importer, scope, fork, tail)
        return
    importer.bind(scope, tail.node, results)
    importer.run(scope, tail.rest, tail.wanted)


def _suppose(scope: Scope, fork: Fork, holds: bool) -> None:
    """From here on the condition holds, or does not."""
    if fork.size is not None:
        scope.frame.ones[fork.size] = holds


def _take(importer: Importer, scope: Scope, fork: Fork, tail: Tail, holds: bool) -> None:
    """Import the tail for the one case that is valid, which the run must then be in."""

    def checked(ctx: Context) -> Sequence[Value]:
        first, *others = fork.branches[0 if holds else 1](ctx)
        if holds and fork.checks_itself:
            return [first, *others]
        condition = fork.condition if holds else ctx.b.op("not", fork.condition)
        message = "the model is not valid for inputs of these sizes"
        return [ctx.b.require(condition, first, message=message), *others]

    _suppose(scope, fork, holds)
    _branch(importer, scope, checked, tail)


def may_fork(ctx: Context) -> bool:
    """Whether there have been few enough forks for what follows to be imported twice."""
    return ctx.importer.forks < MAX_FORKS


def compared_with_one(ctx: Context, condition: Value) -> Size | None:
    """The size that the condition compares with 1, if that is what it does."""
    node = condition.node
    while node.op in ("reshape", "identity", "cast"):
        node = next(node.operands).node
    if node.op != "eq":
        return None
    sides = [ctx.all_sizes(value) or () for value in node.operands]
    one, other = sorted(sides, key=lambda sizes: sizes != (1,))
    return other[0] if one == (1,) and len(other) == 1 and other[0] is not UNKNOWN else None


def squeeze_all(ctx: Context, node: OnnxNode) -> Value:
    """Without the axes of size 1; an axis that may or may not have that size makes two cases."""
    x = ctx.find(node.proto.input[0])
    assert x is not None
    known = [ctx.frame.is_one(size) for size in x.shape]
    if None not in known:
        return ctx.squeeze(x, [axis for axis, is_one in enumerate(known) if is_one])
    size = x.shape[known.index(None)]
    if known.count(None) > MAX_OPEN_AXES or size is UNKNOWN or not may_fork(ctx):
        raise UnmappedError(f"which axes of {x.type} have size 1 is not known")
    actual = ctx.b.gather(ctx.shape_of(x), ctx.const(known.index(None)), axis=0)

    def again(inner: Context) -> list[Value]:
        return [squeeze_all(inner, node)]

    raise Fork(node, ctx.b.eq(actual, ctx.const(1)), again, again, checks_itself=True, size=size)
