"""Conversions between every pair of stored types, on targets with and without the instruction."""

import ml_dtypes
import numpy as np
import pytest
from emitted import WIDTHS, element, lanewise

from bitwright.backends.cpu.codegen.emit import f16, i8, i32, i64

SPECIAL = [0.0, -0.0, 1.0, -1.5, 65504.0, 65519.9, 65520.0, 6e-8, 3e-8, 2.9e-8, 1e-45, 3.4e38]
SPECIAL += [2049.0, 2051.0, 0.1, np.inf, -np.inf, np.nan, 6.1e-5, 6.09e-5, -5.97e-8, 255.5]
BF16 = np.dtype(ml_dtypes.bfloat16)


def floats(dtype):
    rng = np.random.default_rng(0)
    spread = rng.normal(size=4000) * 2.0 ** rng.integers(-30, 20, 4000)
    with np.errstate(over="ignore"):
        return np.concatenate([SPECIAL, spread]).astype(dtype)


@pytest.mark.parametrize("target", WIDTHS)
@pytest.mark.parametrize("to", [np.dtype("f2"), BF16, np.dtype("f4"), np.dtype("f8")], ids=str)
@pytest.mark.parametrize("source", [np.dtype("f2"), BF16, np.dtype("f4"), np.dtype("f8")], ids=str)
def test_floats_round_to_nearest_even(target, source, to):
    x = floats(source)
    found = lanewise(target, lambda f, v: f.convert(v, element(np.empty(0, to))), x, result=to)
    with np.errstate(over="ignore"):
        expected = x.astype(to)
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(found), nan)
    word = f"u{to.itemsize}"
    np.testing.assert_array_equal(found[~nan].view(word), expected[~nan].view(word))


@pytest.mark.parametrize("target", WIDTHS)
def test_every_f16_round_trips_through_f32(target):
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    wide = lanewise(
        target, lambda f, v: f.convert(v, element(np.empty(0, "f4"))), every, result="f4"
    )
    np.testing.assert_array_equal(wide, every.astype("f4"))
    back = lanewise(target, lambda f, v: f.convert(v, f16), wide, result="f2")
    nan = np.isnan(every)
    np.testing.assert_array_equal(back[~nan].view("u2"), every[~nan].view("u2"))
    assert np.isnan(back[nan]).all()


@pytest.mark.parametrize("target", WIDTHS)
def test_floats_saturate_to_integers(target):
    x = np.array([0.9, -0.9, 127.5, 128.0, -128.9, -129.0, 1e30, -1e30, np.nan, np.inf], "f4")
    signed = lanewise(target, lambda f, v: f.convert(v, i8), x, result="i1")
    assert signed.tolist() == [0, 0, 127, 127, -128, -128, 127, -128, 0, 127]
    unsigned = lanewise(target, lambda f, v: f.convert(v, i8, signed=False), x, result="u1")
    assert unsigned.tolist() == [0, 0, 127, 128, 0, 0, 255, 0, 0, 255]


@pytest.mark.parametrize("target", WIDTHS)
@pytest.mark.parametrize("lanes", [1, 4, 16])
def test_rounding_to_integers_is_ties_to_even(target, lanes):
    x = np.array(
        [0.5, 1.5, 2.5, -0.5, -1.5, 0.49999997, 8388607.5, -2e9, 2e9, 0.0, 3.7, -3.7], "f4"
    )
    found = lanewise(target, lambda f, v: f.round_to_int(v), x, result="i4", lanes=lanes)
    np.testing.assert_array_equal(found, np.rint(x).astype("i4"))


@pytest.mark.parametrize("target", WIDTHS)
def test_integers_widen_and_wrap(target):
    x = np.arange(-128, 128, dtype=np.int8)
    np.testing.assert_array_equal(
        lanewise(target, lambda f, v: f.convert(v, i32), x, result="i4"), x.astype("i4")
    )
    np.testing.assert_array_equal(
        lanewise(target, lambda f, v: f.convert(v, i64, signed=False), x, result="i8"),
        x.view(np.uint8).astype("i8"),
    )
    wide = np.array([300, -129, 2**40 + 5, -1], "i8")
    np.testing.assert_array_equal(
        lanewise(target, lambda f, v: f.convert(v, i8), wide, result="i1"), wide.astype("i1")
    )
