"""Ops that only move elements move quantized values: identical results, a quarter of the bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_lower_integer import check, lowered, through, x_of

from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run

MOVES = {
    "expand": lambda b, x: b.expand(x, shape=(3, 4, 5, 6)),
    "tile": lambda b, x: b.tile(x, repeats=(1, 2, 1, 3)),
    "roll": lambda b, x: b.roll(x, shifts=(2,), axes=(3,)),
    "slice": lambda b, x: b.slice(x, starts=(1,), stops=(3,), axes=(2,), steps=(1,)),
    "pad": lambda b, x: b.pad(x, pads=(0, 0, 1, 2, 0, 0, 0, 1)),
    "pad edge": lambda b, x: b.pad(x, pads=(0, 0, 1, 2, 0, 0, 0, 1), mode="edge"),
    "pad by a value": lambda b, x: b.pad(x, b.constant(np.float32(-0.5)), pads=(0, 1) * 4),
    "resize": lambda b, x: b.resize(x, sizes=(1, 4, 10, 12)),
    "smaller": lambda b, x: b.resize(x, sizes=(1, 4, 2, 3)),
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("kind, zero", [("u8", 120), ("i8", None)])
def test_quantized_values_are_moved(move: str, kind: str, zero: int | None) -> None:
    b = Builder("move")
    x = through(b, b.input("x", "f32[1, 4, 5, 6]"), 0.03125, zero, kind)
    ops, _ = check(b.build(MOVES[move](b, x)), 0, x=x_of(1, 4, 5, 6))
    name = move.partition(" ")[0].replace("smaller", "resize")
    assert ops == ["quantize", name, "dequantize"]


@pytest.mark.parametrize("move", [move for move in MOVES if move not in ("slice", "smaller")])
def test_quantize_goes_before_movement(move: str) -> None:
    b = Builder("move")
    x = MOVES[move](b, b.input("x", "f32[1, 4, 5, 6]"))
    ops, _ = check(b.build(through(b, x, 0.0291, 117)), 0, x=x_of(1, 4, 5, 6))
    assert ops == ["quantize", move.partition(" ")[0], "dequantize"]


def test_quantize_stays_behind_a_downsampling_resize() -> None:
    b = Builder("move")
    x = b.resize(b.input("x", "f32[1, 4, 5, 6]"), sizes=(1, 4, 2, 3))
    ops, _ = check(b.build(through(b, x, 0.0291, 117)), 0, x=x_of(1, 4, 5, 6))
    assert ops == ["resize", "quantize", "dequantize"]


def test_split_splits_quantized_values() -> None:
    b = Builder("split")
    x = through(b, b.input("x", "f32[n, 8]"), 0.03, 9)
    first, second = b.split(x, axis=1, sizes=(3, 5))
    graph = b.build(first=first, second=through(b, second, 0.03, 9))
    found, ops, _ = lowered(graph)
    assert ops == ["quantize", "split", "dequantize", "dequantize"]
    feeds = {"x": x_of(4, 8)}
    for name, want in run(graph, feeds).items():
        np.testing.assert_array_equal(run(found, feeds)[name], want)


@pytest.mark.parametrize(
    "make, why",
    [
        (
            lambda b, x: b.pad(x, b.constant(np.float32(0.01)), pads=(0, 1, 0, 1)),
            "no exact quantized value",
        ),
        (
            lambda b, x: b.pad(x, b.constant(np.float32(99)), pads=(0, 1, 0, 1)),
            "no exact quantized value",
        ),
        (lambda b, x: b.resize(x, sizes=(4, 12), mode="linear"), "interpolates"),
    ],
)
def test_what_stays_float_has_a_reason(make: Any, why: str) -> None:
    b = Builder("other")
    x = through(b, b.input("x", "f32[4, 6]"), 0.03, 9)
    ops, refused = check(b.build(make(b, x)), 0, x=x_of(4, 6))
    assert ops[:2] == ["quantize", "dequantize"] and why in refused


POOLS = [
    ({"kernel": (3, 3), "pads": (2, 2, 2, 2)}, True),
    ({"kernel": (3, 2), "dilations": (2, 3), "pads": (4, 1, 0, 3)}, True),
    ({"kernel": (2, 2), "pads": (2, 0, 0, 0)}, False),
    ({"kernel": (2, 2), "dilations": (1, 7), "pads": (0, 6, 0, 6)}, False),
]


@pytest.mark.parametrize("attrs, moves", POOLS)
def test_pools_with_windows_entirely_in_the_padding_stay_float(attrs: Any, moves: bool) -> None:
    b = Builder("pool")
    x = through(b, b.input("x", "f32[2, 4, 5, 6]"), 0.03, 9)
    ops, refused = check(
        b.build(through(b, b.max_pool(x, **attrs), 0.04, 3)), 0, x=x_of(2, 4, 5, 6)
    )
    assert (ops[:2] == ["quantize", "max_pool"]) == moves
    assert moves or "entirely in the padding" in refused


def test_a_function_with_a_quantized_intermediate_is_one_table() -> None:
    """x · sigmoid(x) as other tools write it, with a quantized sigmoid."""
    b = Builder("silu")
    x = through(b, b.input("x", "f32[n, 33]"), 0.05, 110)
    gate = through(b, b.sigmoid(x), 1 / 256, 0)
    y = through(b, b.mul(x, gate), 0.04, 7)
    ops, _ = check(b.build(y), 0, x=3 * x_of(5, 33))
    assert ops == ["quantize", "lookup_table", "dequantize"]


def test_functions_of_two_quantized_values_are_no_table() -> None:
    b = Builder("gate")
    x = through(b, b.input("x", "f32[n, 33]"), 0.05, 110)
    other = through(b, b.input("z", "f32[n, 33]"), 0.05, 110)
    gate = through(b, b.sigmoid(other), 1 / 256, 0)
    ops, _ = check(b.build(through(b, b.mul(x, gate), 0.04, 7)), 0.04, x=x_of(5, 33), z=x_of(5, 33))
    assert ops.count("lookup_table") == 1 and "mul" in ops
