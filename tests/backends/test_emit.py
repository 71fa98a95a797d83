"""The builder: values, control flow, memory, and errors."""

import time

import numpy as np
import pytest
from emitted import WIDTHS, Compiled, instructions, lanewise, scale_kernel, undefined_symbols

from bitwright.backends.cpu.codegen import jit
from bitwright.backends.cpu.codegen.emit import Module, Signature, f32, i1, i8, i32, i64, ptr, void
from bitwright.backends.cpu.codegen.emit.types import constant, f16
from bitwright.errors import CompileError
from bitwright.target import host, named

F32 = np.array([0.0, -0.0, 1.5, -2.5, 0.5, -0.5, 2.5, 1e9, -1e9, 3.3e38, np.inf, np.nan], "f4")


def emit(body, pointers=("y",), sizes=("n",), target="host"):
    module = Module(named(target))
    with module.kernel("kernel", Signature(pointers, sizes)) as f:
        body(f)
    return Compiled(module)


@pytest.mark.parametrize("target", WIDTHS)
@pytest.mark.parametrize("count", [0, 1, 7, 16, 17, 33, 127])
@pytest.mark.parametrize("threads", [1, 3])
def test_vectors_cover_any_size_and_nothing_else(target, count, threads):
    x, y = np.arange(count + 40, dtype="f4"), np.full(count + 40, -1, "f4")
    Compiled(scale_kernel(named(target)))(threads=threads, x=x, y=y, count=count)
    np.testing.assert_array_equal(y[:count], 2 * x[:count])
    assert (y[count:] == -1).all()


@pytest.mark.parametrize("target", WIDTHS)
@pytest.mark.parametrize("name", ["floor", "ceil", "trunc", "round"])
def test_rounding_to_integers(target, name):
    expected = getattr(np, "rint" if name == "round" else name)(F32)
    found = lanewise(target, lambda f, x: getattr(f, name)(x), F32)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(np.signbit(found[:11]), np.signbit(expected[:11]))


@pytest.mark.parametrize("target", WIDTHS)
def test_min_and_max_propagate_nan(target):
    other = F32[::-1].copy()
    for name, expected in (("min", np.minimum), ("max", np.maximum)):
        found = lanewise(target, lambda f, x, y, n=name: getattr(f, n)(x, y), F32, other)
        np.testing.assert_array_equal(found, expected(F32, other))
        found = lanewise(target, lambda f, x, n=name: getattr(f, n)(x, 0.5), F32)
        np.testing.assert_array_equal(found, expected(F32, np.float32(0.5)))


@pytest.mark.parametrize("lanes", [1, 2, 4, 16])
def test_reductions_add_in_a_fixed_tree(lanes):
    x = np.random.default_rng(0).normal(size=lanes).astype("f4")

    def body(f):
        v = f.load(f32.vector(lanes), f.args.pointer("x"))
        f.store(f.reduce_add(v), f.args.pointer("y"))

    y, tree = np.zeros(1, "f4"), x
    emit(body, ("x", "y"), ())(x=x, y=y)
    while tree.size > 1:
        tree = tree[: tree.size // 2] + tree[tree.size // 2 :]
    assert y[0] == tree[0]


def test_loops_carry_values():
    def body(f):
        with f.loop(0, f.args.size("n"), 2, carry=(f.const(i64, 0), f.const(i64, 1))) as loop:
            total, power = loop.carried
            loop.next(total + loop.index, power * 2)
        for at, value in enumerate(loop.results):
            f.store(value, f.args.pointer("y"), at)

    compiled, y = emit(body), np.zeros(2, "i8")
    for n in (-3, 0, 1, 6, 7):
        compiled(y=y, n=n)
        turns = range(0, n, 2)
        assert y.tolist() == [sum(turns), 2 ** len(turns)]


def test_branches_and_do_while_carry_values():
    def body(f):
        n = f.args.size("n")
        with f.if_(f.gt(n, 10), carry=(n,)) as branch:
            branch.next(f.const(i64, 10))
        with branch.else_(), f.if_(f.lt(n, 0)):
            f.store(f.const(i64, 1), f.args.pointer("y"), 2)
        with f.do_while(carry=(n, f.const(i64, 0))) as loop:
            half = f.lshr(loop.carried[0], 1)
            loop.next(half, loop.carried[1] + 1, again=f.ne(half, 0))
        f.store(branch.results[0], f.args.pointer("y"), 0)
        f.store(loop.results[1], f.args.pointer("y"), 1)

    compiled = emit(body)
    for n in (3, 40, -5):
        y = np.zeros(3, "i8")
        compiled(y=y, n=n)
        assert y.tolist() == [min(n, 10), max(1, n.bit_length()) if n >= 0 else 64, int(n < 0)]


@pytest.mark.parametrize("target", WIDTHS)
def test_masked_and_indexed_memory(target):
    lanes = named(target).lanes(32)

    def body(f):
        mask = f.mask(f.args.size("n"), lanes)
        x, y = f.args.pointer("x"), f.args.pointer("y")
        f.store(f.load(f32.vector(lanes), x, mask=mask, default=9.0), y)
        picked = f.gather(f32.vector(lanes), x, f.iota(i32, lanes) * 2, mask=mask, default=-1.0)
        f.store(picked, y, lanes)
        f.scatter(picked, f.gep(f32, y, 2 * lanes), f.iota(i64, lanes) * 3, mask=mask)

    compiled, x = emit(body, ("x", "y"), ("n",), target), np.arange(64, dtype="f4")
    for n in (-1, 0, 1, lanes - 1, lanes, lanes + 5):
        y, inside = np.zeros(5 * lanes, "f4"), np.arange(lanes) < n
        compiled(x=x, y=y, n=n)
        np.testing.assert_array_equal(y[:lanes], np.where(inside, x[:lanes], 9))
        doubled = np.where(inside, x[: 2 * lanes : 2], -1)
        np.testing.assert_array_equal(y[lanes : 2 * lanes], doubled)
        np.testing.assert_array_equal(y[2 * lanes :: 3], np.where(inside, doubled, 0))


@pytest.mark.parametrize("target", WIDTHS)
def test_one_narrow_lane_is_stored_alone(target):
    """LLVM would store the four bytes of the wider lane."""
    lanes = named(target).lanes(32)

    def body(f):
        x, y = f.args.pointer("x"), f.args.pointer("y")
        narrow = f.convert(f.load(i32.vector(lanes), x), i8)
        f.store(narrow, y, mask=f.mask(f.index(1), lanes))

        def put(at, mask):
            f.store(f.convert(f.load(i32.vector(lanes), x, at, mask=mask), i8), y, at, mask=mask)

        f.vectors(lanes, 2 * lanes + 1, lanes, put)

    y = np.zeros(64, np.int8)
    emit(body, ("x", "y"), (), target)(x=np.full(64, 0x01020304, "i4"), y=y)
    stored = np.arange(64)
    np.testing.assert_array_equal(
        y == 4, (stored == 0) | ((stored >= lanes) & (stored <= 2 * lanes))
    )
    assert not y[y != 4].any()


def test_shuffles_and_parts():
    x = np.arange(8, dtype="i4")

    def body(f):
        v, y = f.load(i32.vector(8), f.args.pointer("x")), f.args.pointer("y")
        low, high = f.part(v, 0, 4), f.part(v, 4, 4)
        f.store(f.interleave(low, high), y)
        f.store(f.join(high, low), y, 8)
        f.store(f.with_lane(v, 3, f.lane(v, f.const(i64, 7))), y, 16)
        f.store(f.shuffle(v, range(7, -1, -1)), y, 24)
        f.store(f.convert(f.any(f.gt(v, 6)), i32), y, 32)
        f.store(f.convert(f.all(f.gt(v, 6)), i32), y, 33)

    y = np.zeros(34, "i4")
    emit(body, ("x", "y"), ())(x=x, y=y)
    rows = [0, 4, 1, 5, 2, 6, 3, 7], [4, 5, 6, 7, 0, 1, 2, 3], [0, 1, 2, 7, 4, 5, 6, 7]
    assert y.tolist() == [*rows[0], *rows[1], *rows[2], *range(7, -1, -1), 1, 0]


def test_products_and_sums_are_fused_only_by_fma():
    def both(f, asked):
        x = f.load(f32.vector(16), f.args.pointer("y"))
        f.store(f.fma(x, x, x) if asked else x * x + x, f.args.pointer("y"))

    if not host().has_fma:
        pytest.skip("this machine has no fused multiply-add")
    for asked in (True, False):
        module = Module(host())
        with module.kernel("kernel", Signature(("y",))) as f:
            both(f, asked)
        fused = [line for line in instructions(module) if "fmadd" in line or "fmla" in line]
        assert bool(fused) == asked


@pytest.mark.parametrize("target", ["host", "sse2", "aarch64", "riscv64", "wasm32"])
def test_emitted_code_calls_no_library(target):
    """Rounding, half floats, remainders and copies are expanded inline."""
    from bitwright.backends.cpu.codegen import math

    module = Module(named(target))
    with module.kernel("kernel", Signature(("x", "y"), ("n",))) as f:
        x, y = f.args.pointer("x"), f.args.pointer("y")
        v = f.load(f32.vector(4), x)
        v = f.round(f.floor(v)) + f.convert(f.convert(v, f16), f32)
        f.store(math.remainder(f, math.sin(f, v), v + f.fma(v, v, v)), y)
        with f.loop(0, f.args.size("n")) as loop:
            f.store(f.load(f32, x, loop.index), y, loop.index)
    assert undefined_symbols(module.text(), module.target) == []


def test_functions_call_each_other():
    module = Module(host())
    with module.function("square", i64, (("x", i64),), inline=True) as square:
        square.ret(square.params[0] * square.params[0])
    with module.function("twice", void, (("p", ptr),)) as twice:
        twice.store(twice.load(i64, twice.params[0]) * 2, twice.params[0])
    with module.kernel("kernel", Signature(("y",), ("n",))) as f:
        f.store(f.call(square, f.args.size("n")), f.args.pointer("y"))
        f.call(twice, f.args.pointer("y"))
    y = np.zeros(1, "i8")
    Compiled(module)(y=y, n=7)
    assert y[0] == 98


def test_constant_tables_are_part_of_the_module():
    numbers = [3.0, 1.0, 4.0, 1.0, 5.0]

    def body(f):
        table = f.module.table(f, f32, numbers)
        assert table.text == f.module.table(f, f32, numbers).text
        f.store(f.load(f32, table, f.args.size("n")), f.args.pointer("y"))

    compiled, y = emit(body), np.zeros(1, "f4")
    for n, number in enumerate(numbers):
        compiled(y=y, n=n)
        assert y[0] == number


def test_constants_are_written_exactly():
    assert constant(f32, 0.1) == "0x3FB99999A0000000"
    assert constant(f32, 1e300) == "0x7FF0000000000000"
    assert constant(f16.vector(2), 1.0) == "splat (half 0xH3C00)"
    assert constant(i32, 0xFFFFFFFF) == "-1"
    assert constant(i1, 1) == "true"
    assert constant(f32, -0.0) != constant(f32, 0.0)


def test_errors_name_the_misuse():
    module = Module(host())
    with module.kernel("kernel", Signature(("y",), ("n",))) as f:
        n = f.args.size("n")
        with pytest.raises(CompileError, match="wrong type; expected i64, found float"):
            n + f.const(f32, 1.0)
        with pytest.raises(CompileError, match="no truth value in Python"):
            bool(f.gt(n, 0))
        with pytest.raises(CompileError, match="no size 'y'"):
            f.args.size("y")
        with pytest.raises(CompileError, match="must call next"), f.loop(0, n, carry=(n,)):
            pass
    with pytest.raises(CompileError, match="same name"):
        Signature(("x",), ("x",))
    with pytest.raises(CompileError, match="not filled; found n"):
        Signature((), ("n", "m")).pack(m=1)
    with pytest.raises(CompileError, match="LLVM refuses"):
        jit.compile_object("define nonsense", host())


def test_emission_is_fast():
    """Some thousand instructions take milliseconds; the bound allows for a busy machine."""

    def emit_many():
        module = Module(host())
        with module.kernel("kernel", Signature(("y",))) as f:
            v = f.load(f32.vector(16), f.args.pointer("y"))
            for _ in range(2500):
                v = f.fma(v, v, v) + 1.0
            f.store(v, f.args.pointer("y"))
        return module.text()

    best = float("inf")
    for _ in range(5):
        begin = time.thread_time()
        emit_many()
        best = min(best, time.thread_time() - begin)
    assert best < 0.1, f"{best * 1e3:.0f} ms for 5000 instructions"
