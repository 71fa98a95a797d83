"""The assumptions about sizes that torch made while tracing, beyond the types of the inputs.

A guard is a Python expression such as `L['x'].size()[0] > 4` that is true for the example: a branch
that the module took, or a check that it passed. Most guards hold for all sizes, only exclude 0 and
1, or repeat a bound, and the imported ops make the same checks. The others are reported to the
user. A guard that sets an expression of sizes equal to a number means that a size is static.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from bitwright.errors import BitwrightError, ImportModelError
from bitwright.ir.dim import Size, max_size, min_size
from bitwright.ir.graph import Value
from bitwright.ops.core.decide import below, equal, negated

_SOURCE = re.compile(r"L((?:\['[^']*'\]|\[\d+\])+)\.size\(\)\[(\d+)\]")
_NUMBER = re.compile(r"L\['([^']*)'\]")
_STEP = re.compile(r"\['([^']*)'\]|\[(\d+)\]")
_OPERATIONS: dict[type[ast.operator], Callable[[Size, Size], Size]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Size, Size], bool | None]] = {
    ast.Eq: equal,
    ast.NotEq: lambda a, b: negated(equal(a, b)),
    ast.Lt: below,
    ast.LtE: lambda a, b: negated(below(b, a)),
    ast.Gt: lambda a, b: below(b, a),
    ast.GtE: lambda a, b: negated(below(a, b)),
}


def conditions(guards: Iterable[str], inputs: Mapping[str, Value], module: str) -> list[str]:
    """The guards to report to the user, in terms of the names of sizes."""
    found: dict[str, None] = {}
    for guard in guards:
        sizes: dict[str, Size] = {}
        plain = _SOURCE.sub(partial(_identifier, inputs, sizes), guard)
        plain = _NUMBER.sub(r"\1", plain)
        try:
            test = ast.parse(plain, mode="eval").body
        except SyntaxError:
            found[guard] = None
            continue
        if _holds(test, sizes) or _is_minor(test):
            continue
        text = ast.unparse(test)
        for name, size in sizes.items():
            text = text.replace(name, str(size) if str(size).isidentifier() else f"({size})")
        if _is_static(test):
            raise ImportModelError(
                f"the module fixes a size: {text}",
                where=f"module {module!r}",
                expected="a size that may change",
                hint="int() of a size fixes it; // and math.floor do not.",
            )
        found[text] = None
    return list(found)


def _identifier(inputs: Mapping[str, Value], sizes: dict[str, Size], match: re.Match[str]) -> str:
    """A new name in `sizes` for the size of an axis of an input."""
    path = ".".join(name or index for name, index in _STEP.findall(match[1]))
    value, axis = inputs.get(path), int(match[2])
    if value is None or axis >= value.rank:
        return f"size({path!r}, {axis})"
    name = f"_size{len(sizes)}_"
    sizes[name] = value.shape[axis]
    return name


def _holds(test: ast.expr, sizes: Mapping[str, Size]) -> bool:
    """Whether the guard is true for all values of the symbols."""
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return False
    try:
        left, right = _size(test.left, sizes), _size(test.comparators[0], sizes)
    except (BitwrightError, KeyError, TypeError):
        return False
    return _COMPARISONS[type(test.ops[0])](left, right) is True


def _size(node: ast.expr, sizes: Mapping[str, Size]) -> Size:
    if isinstance(node, ast.Name):
        return sizes[node.id]
    if (number := _constant(node)) is not None:
        return number
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_size(node.operand, sizes)
    if isinstance(node, ast.BinOp):
        left, right = _size(node.left, sizes), _size(node.right, sizes)
        return _OPERATIONS[type(node.op)](left, right)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        first, *rest = (_size(argument, sizes) for argument in node.args)
        for size in rest:
            first = {"max": max_size, "min": min_size}[node.func.id](first, size)
        return first
    raise TypeError(ast.unparse(node))


def _constant(node: ast.expr) -> int | None:
    return node.value if isinstance(node, ast.Constant) and type(node.value) is int else None


def _is_minor(test: ast.expr) -> bool:
    """Whether a guard excludes sizes below 2, bounds one size, or concerns memory layout.

    Torch compares sizes with strides, so an inequality of two expressions implies no branch.
    """
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return False
    kind, number = test.ops[0], _constant(test.comparators[0])
    is_plain = isinstance(test.left, ast.Name) and number is not None
    if isinstance(kind, ast.NotEq):
        return not is_plain or number in (0, 1)
    if number is None:
        return False
    if isinstance(kind, (ast.Gt, ast.GtE)):
        return number <= (1 if isinstance(kind, ast.Gt) else 2)
    return isinstance(kind, (ast.Lt, ast.LtE)) and is_plain


def _is_static(test: ast.expr) -> bool:
    if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], ast.Eq):
        return False
    divides = any(isinstance(part, ast.Mod) for part in ast.walk(test.left))
    return _constant(test.comparators[0]) is not None and not divides
