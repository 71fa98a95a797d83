"""Values whose rank depends on run-time data: the rest of the graph is imported for each case.

The values of a graph have a fixed rank; those of ONNX need not. PyTorch exports `x.squeeze(1)` as

    y = If(size == 1) { Squeeze(x, 1) } else { Identity(x) }

The mapping of such a node raises `Fork`. The importer then makes one body per case from the branch
and all nodes after it in its scope, and an `if` selects between them. If the types of one case are
invalid, the model would fail in that case: only the other case is imported, and a `require` fails
the run when the condition does not hold. A size that was compared with 1 is not compared again in
the bodies. A model with many forks falls back to values of unknown rank, which the interpreter
fallback computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from onnx import NodeProto

from bitwright.errors import ImportModelError, UnsupportedError
from bitwright.frontend.onnx.api import OnnxNode, UnmappedError
from bitwright.frontend.onnx.bodies import captures_of, finish_body
from bitwright.frontend.onnx.context import Body, Context
from bitwright.frontend.onnx.frame import Scope
from bitwright.ir import UNKNOWN, Size, Value

if TYPE_CHECKING:
    from bitwright.frontend.onnx.importer import Importer

Branch = Callable[[Context], Sequence[Value]]
MAX_OPEN_AXES = 3
MAX_FORKS = 64


class Fork(Exception):  # noqa: N818 - control flow, not an error
    """Raised by a mapping: the ranks of the node's results depend on the condition."""

    def __init__(
        self,
        node: OnnxNode,
        condition: Value,
        then: Branch,
        otherwise: Branch,
        checks_itself: bool = False,
        size: Size | None = None,
    ) -> None:
        super().__init__("the rank of a value depends on run-time data")
        self.node, self.condition, self.branches = node, condition, (then, otherwise)
        self.checks_itself = checks_itself
        """Whether `then` itself fails in a run where the condition does not hold."""
        self.size = size
        """The size whose equality with 1 is the condition, if it has that form."""


@dataclass(frozen=True)
class Tail:
    """A node, the nodes after it, and the names of the results that their scope needs."""

    node: OnnxNode
    rest: Sequence[NodeProto]
    wanted: Sequence[str]

    @property
    def results(self) -> list[str]:
        """The needed names that these nodes compute."""
        made = {name for proto in (self.node.proto, *self.rest) for name in proto.output if name}
        return [name for name in dict.fromkeys(self.wanted) if name in made]


def import_cases(importer: Importer, scope: Scope, fork: Fork, tail: Tail) -> None:
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
        _import_valid_case(importer, scope, fork, tail, holds=isinstance(then, Body))
        return
    captures = captures_of([then, otherwise])
    attrs = {"then": finish_body(then, captures), "else": finish_body(otherwise, captures)}
    ctx = Context(importer, scope)
    operands = [ctx.reshape(fork.condition, []), *captures]
    values = ctx.b.node("if", operands, attrs, []).outputs
    for name, value in zip(tail.results, values, strict=True):
        scope.values[name] = value
        scope.frame.claim(value, name)


def _case(importer: Importer, scope: Scope, fork: Fork, tail: Tail, holds: bool) -> Body:
    inner = importer.nested_scope(scope, "case")
    inner.declared = scope.declared
    _assume(inner, fork, holds)
    _branch(importer, inner, fork.branches[0 if holds else 1], tail)
    outputs = [(name, importer.output(inner, name)) for name in tail.results]
    return Body(inner.frame, [], outputs)


def _branch(importer: Importer, scope: Scope, branch: Branch, tail: Tail) -> None:
    try:
        results = branch(Context(importer, scope))
    except Fork as fork:
        import_cases(importer, scope, fork, tail)
        return
    importer.bind(scope, tail.node, results)
    importer.run(scope, tail.rest, tail.wanted)


def _assume(scope: Scope, fork: Fork, holds: bool) -> None:
    """Record in the scope whether the condition holds."""
    if fork.size is not None:
        scope.frame.ones[fork.size] = holds


def _import_valid_case(
    importer: Importer, scope: Scope, fork: Fork, tail: Tail, holds: bool
) -> None:
    """Import the tail for the one valid case, with a check that the run is in that case."""

    def checked(ctx: Context) -> Sequence[Value]:
        first, *others = fork.branches[0 if holds else 1](ctx)
        if holds and fork.checks_itself:
            return [first, *others]
        condition = fork.condition if holds else ctx.b.op("not", fork.condition)
        message = "the model is not valid for inputs of these sizes"
        return [ctx.b.require(condition, first, message=message), *others]

    _assume(scope, fork, holds)
    _branch(importer, scope, checked, tail)


def may_fork(ctx: Context) -> bool:
    """Whether the number of forks allows importing the rest of the graph twice."""
    return ctx.importer.forks < MAX_FORKS


def compared_with_one(ctx: Context, condition: Value) -> Size | None:
    """The size that the condition compares with 1, if it has that form."""
    node = condition.node
    while node.op in ("reshape", "identity", "cast"):
        node = next(node.operands).node
    if node.op != "eq":
        return None
    sides = [ctx.all_sizes(value) or () for value in node.operands]
    one, other = sorted(sides, key=lambda sizes: sizes != (1,))
    return other[0] if one == (1,) and len(other) == 1 and other[0] is not UNKNOWN else None


def squeeze_all(ctx: Context, node: OnnxNode) -> Value:
    """`Squeeze` without axes; an axis whose size may be 1 forks the graph."""
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
