"""Symbolic sizes as ONNX values: `2*seq+1` becomes Shape, Gather, Mul, Add.

The first value whose type contains a symbol binds it, inputs before results: `seq` from
`x: f32[batch, seq]` is Gather(Shape(x), 1), and from `f32[2*seq+1]` it is (that - 1) / 2.
All sizes are vectors of one i64, which can be concatenated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bitwright.export.onnx.scope import Ref, Scope
from bitwright.ir.dim import Atom, Dim, Size, Symbol, symbols_of
from bitwright.ir.dtype import i64
from bitwright.ir.types import TensorType, ValueType


def bind_all(scope: Scope, refs: Iterable[Ref]) -> None:
    """Bind the symbols in the types of several values: plain symbols first, then the others."""
    known = [(ref, ref.type) for ref in refs if ref.type is not None]
    for plain in (True, False, False):
        for ref, type_ in known:
            bind(scope, ref, type_, plain)


def bind(scope: Scope, ref: Ref, type_: ValueType, plain: bool = False) -> None:
    """Bind the symbols in the type of a value; with `plain` not those in `2*seq` and the like."""
    if not isinstance(type_, TensorType):
        return
    for axis, size in enumerate(type_.shape):
        missing = [s.name for s in symbols_of(size) if _binder(scope, s.name) is None]
        if len(missing) != 1 or (plain and not _is_symbol(size)):
            continue
        if _linear_parts(size, missing[0]) is not None:
            scope.bindings[missing[0]] = (ref, axis, size)


def sizes_tensor(scope: Scope, sizes: Sequence[Size]) -> Ref:
    """The sizes as an i64 vector."""
    parts: list[Ref] = []
    run: list[int] = []
    for size in sizes:
        if isinstance(size, Dim):
            if run:
                parts.append(scope.ints(run))
                run = []
            parts.append(size_vector(scope, size))
        else:
            run.append(int(size))
    if run or not parts:
        parts.append(scope.ints(run))
    return parts[0] if len(parts) == 1 else scope.Concat(*parts, axis=0)


def size_scalar(scope: Scope, size: Size) -> Ref:
    """One size as a value of rank 0."""
    if not isinstance(size, Dim):
        return scope.constant(size, i64)
    return scope.Squeeze(size_vector(scope, size), scope.ints([0]))


def size_vector(scope: Scope, size: Size) -> Ref:
    """One size as a vector of length 1."""
    if not isinstance(size, Dim):
        return scope.ints([int(size)])
    owner: Scope | None = scope
    while owner:
        if size in owner.sizes_known:
            return owner.sizes_known[size]
        owner = owner.parent
    total: Ref | None = None
    for monomial, coefficient in size.terms:
        factors = [_atom(scope, atom) for atom in monomial]
        if abs(coefficient) != 1 or not factors:
            factors.append(scope.ints([abs(coefficient)]))
        term = factors[0]
        for factor in factors[1:]:
            term = scope.Mul(term, factor)
        if total is None:
            total = term if coefficient > 0 else scope.Neg(term)
        else:
            total = scope.Add(total, term) if coefficient > 0 else scope.Sub(total, term)
    assert total is not None
    scope.sizes_known[size] = total
    return total


def _atom(scope: Scope, atom: Atom) -> Ref:
    if isinstance(atom, Symbol):
        return _symbol(scope, atom.name)
    kind, (left, right) = atom.kind, atom.args
    a, b = size_vector(scope, left), size_vector(scope, right)
    if kind == "floordiv":
        if not (_is_natural(left) and _is_natural(right)):  # ONNX division truncates
            a = scope.Sub(a, scope.Mod(a, b))
        return scope.Div(a, b)
    if kind == "mod":
        return scope.Mod(a, b)
    if kind == "broadcast":  # a broadcast size is 1 or the result
        one = scope.ints([1])
        return scope.Where(scope.Equal(a, one), b, a)
    return scope.emit("Max" if kind == "max" else "Min", [a, b])[0]


def _binder(scope: Scope, name: str) -> Scope | None:
    """The scope, this or an enclosing one, that binds a symbol."""
    owner: Scope | None = scope
    while owner and name not in owner.bindings:
        owner = owner.parent
    return owner


def _symbol(scope: Scope, name: str) -> Ref:
    owner = _binder(scope, name)
    if owner is None:
        raise scope.reject(f"no input and no value before it binds the size {name!r}")
    ref, axis, size = owner.bindings[name]
    key = Dim((((Symbol(name),), 1),))
    if key in owner.sizes_known:
        return owner.sizes_known[key]
    if ref not in owner.shapes_known:
        owner.shapes_known[ref] = owner.Shape(ref)
    value = owner.Gather(owner.shapes_known[ref], owner.ints([axis]), axis=0)
    if not _is_symbol(size):
        factor, rest = _linear_parts(size, name) or (1, 0)
        if rest != 0:
            value = owner.Sub(value, size_vector(owner, rest))
        if factor != 1:
            value = owner.Div(value, size_vector(owner, factor))
    owner.sizes_known[key] = value
    return value


def _linear_parts(size: Size, name: str) -> tuple[Size, Size] | None:
    """`(factor, rest)` with size = factor * name + rest, or None if it is not of that form."""
    if not isinstance(size, Dim):
        return None
    factor: Size = 0
    rest: Size = 0
    for monomial, coefficient in size.terms:
        held = [a for a in monomial if isinstance(a, Symbol) and a.name == name]
        others = [a for a in monomial if not (isinstance(a, Symbol) and a.name == name)]
        if len(held) > 1 or any(_mentions(a, name) for a in others):
            return None
        term: Size = coefficient
        for atom in others:
            term = term * Dim((((atom,), 1),))
        if held:
            factor = factor + term
        else:
            rest = rest + term
    return factor, rest


def _mentions(atom: Atom, name: str) -> bool:
    if isinstance(atom, Symbol):
        return atom.name == name
    return any(s.name == name for arg in atom.args for s in symbols_of(arg))


def _is_symbol(size: Size) -> bool:
    return (
        isinstance(size, Dim)
        and len(size.terms) == 1
        and size.terms[0][1] == 1
        and len(size.terms[0][0]) == 1
        and isinstance(size.terms[0][0][0], Symbol)
    )


def _is_natural(size: Size) -> bool:
    """Whether the expression is clearly at least 0."""
    if not isinstance(size, Dim):
        return size >= 0
    return all(
        coefficient > 0
        and all(isinstance(a, Symbol) or all(map(_is_natural, a.args)) for a in monomial)
        for monomial, coefficient in size.terms
    )
