"""Casts of narrow types by tables: bit-exact against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bitwright.ir.dtype import DTYPES, DType
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run
from bitwright.pipeline import compile_graph

NARROW = [
    d for d in DTYPES.values() if d.numpy.itemsize == 1 and d.name not in ("i8", "u8", "bool")
]


def samples() -> np.ndarray[Any, Any]:
    """Random bit patterns, and values at and next to the rounding boundaries of narrow types."""
    bits = np.random.default_rng(0).integers(0, 2**32, 20_000, dtype=np.uint64).astype(np.uint32)
    powers = 2.0 ** np.arange(-20, 20)
    borders = np.concatenate([np.arange(-700, 700) / 32, powers, 1.5 * powers]).astype(np.float32)
    above, below = (np.nextafter(borders, np.float32(side)) for side in (np.inf, -np.inf))
    return np.concatenate([bits.view(np.float32), borders, above, below])


def assert_same(source: DType, target: DType, saturate: bool) -> None:
    b = Builder("cast")
    graph = b.build(y=b.cast(b.input("x", f"{source}[n]"), to=target, saturate=saturate))
    executable = compile_graph(graph, threads=2)
    assert not any(executable.engine.schedule.fallbacks)  # type: ignore[attr-defined]
    with np.errstate(all="ignore"):
        x = samples().astype(source.numpy)
    found, want = executable.run({"x": x})["y"], run(graph, {"x": x})["y"]
    assert found.dtype == want.dtype
    assert found.tobytes() == want.tobytes()


@pytest.mark.parametrize("saturate", [True, False])
@pytest.mark.parametrize("source", ["f32", "f16", "bf16", "i16", "u8", "bool", "i4", "f8e5m2"])
@pytest.mark.parametrize("target", NARROW, ids=str)
def test_to_narrow_types(source: str, target: DType, saturate: bool) -> None:
    if target.name != source:
        assert_same(DTYPES[source], target, saturate)


@pytest.mark.parametrize("target", ["f64", "f32", "f16", "bf16", "i64", "i8", "u16", "bool"])
@pytest.mark.parametrize("source", NARROW, ids=str)
def test_from_narrow_types(source: DType, target: str) -> None:
    assert_same(source, DTYPES[target], True)
