"""The polynomials meet the errors that their modules state, at every vector width."""

import math as python_math

import numpy as np
import pytest
from emitted import WIDTHS, lanewise

from bitwright.backends.cpu.codegen import math
from bitwright.backends.cpu.codegen.emit import f32
from bitwright.target import named

# units in the last place, f32 and f64
LIMITS = {
    "exp": (1.1, 1.1),
    "expm1": (2, 2),
    "log": (1, 1),
    "log1p": (2, 2),
    "tanh": (2, 4),
    "sigmoid": (3, 4),
    "sinh": (1, 4),
    "cosh": (1, 4),
    "asinh": (1, 4),
    "acosh": (1, 4),
    "atanh": (3, 4),
    "erf": (1.2, 2),
    "sin": (2, 2),
    "cos": (2, 2),
    "tan": (1, 4),
    "asin": (1, 3),
    "acos": (1, 3),
    "atan": (1, 3),
}
NUMPY = {"asin": "arcsin", "acos": "arccos", "atan": "arctan"}
NUMPY |= {"asinh": "arcsinh", "acosh": "arccosh", "atanh": "arctanh"}
WIDE = np.longdouble


def reference(name, x):
    """The function in a type wider than the tested one."""
    if name == "erf":
        return np.array([python_math.erf(v) for v in x.tolist()], WIDE)
    x = x.astype(WIDE)
    if name == "sigmoid":
        return 1 / (1 + np.exp(-x))
    return getattr(np, NUMPY.get(name, name))(x)


def samples(dtype, count):
    """Random bit patterns, the interesting ranges, and special numbers."""
    rng, info = np.random.default_rng(0), np.finfo(dtype)
    word = np.dtype(f"u{info.dtype.itemsize}")
    bits = rng.integers(0, 1 << (8 * word.itemsize), count, dtype=np.uint64).astype(word)
    high = float(np.log(info.max))
    special = [0, -0.0, 1, -1, 0.5, -0.5, np.inf, -np.inf, np.nan, info.max, info.min, info.tiny]
    special += [info.smallest_subnormal, -info.smallest_subnormal, 0.625, 2.0**20, -(2.0**20)]
    special += [high, high + 1, -high, -high - 15, -high - 30, 1e5, np.pi / 2, np.pi]
    return np.concatenate(
        [
            bits.view(dtype),
            rng.uniform(-1, 1, count).astype(dtype),
            rng.uniform(-7, 7, count).astype(dtype),
            rng.uniform(-1.2 * high, 1.2 * high, count).astype(dtype),
            (1 + rng.uniform(-1e-3, 1e-3, count)).astype(dtype),
            np.array(special, dtype),
        ]
    )


def error(found, expected, dtype):
    """The largest error in units of the last place; values that are not finite must agree."""
    with np.errstate(over="ignore"):
        rounded = expected.astype(dtype)
    finite = np.isfinite(rounded) & np.isfinite(found)
    np.testing.assert_array_equal(found[~finite], rounded[~finite])
    unit = np.spacing(np.abs(rounded[finite])).astype(WIDE)
    return float(np.max(np.abs(found[finite].astype(WIDE) - expected[finite]) / unit))


@pytest.mark.parametrize("target", WIDTHS)
@pytest.mark.parametrize("name", LIMITS)
def test_f32_is_within_its_stated_error(target, name):
    x = samples(np.float32, 4000 if name == "erf" else 20000)
    with np.errstate(all="ignore"):
        expected = reference(name, x)
        lanes = named(target).lanes(32)
        found = lanewise(target, lambda f, v: getattr(math, name)(f, v), x, lanes=lanes)
        assert error(found, expected, np.float32) <= LIMITS[name][0]


@pytest.mark.skipif(np.finfo(WIDE).nmant < 60, reason="numpy has no type wider than f64 here")
@pytest.mark.parametrize("target", WIDTHS[::2])
@pytest.mark.parametrize("name", [name for name in LIMITS if name != "erf"])
def test_f64_is_within_its_stated_error(target, name):
    x = samples(np.float64, 4000)
    with np.errstate(all="ignore"):
        found = lanewise(target, lambda f, v: getattr(math, name)(f, v), x, lanes=4)
        assert error(found, reference(name, x), np.float64) <= LIMITS[name][1]


@pytest.mark.parametrize("target", WIDTHS[::2])
def test_erf_in_f64_agrees_with_the_c_library(target):
    """Whose own error is below one unit."""
    x = samples(np.float64, 2000)
    found = lanewise(target, lambda f, v: math.erf(f, v), x, lanes=4)
    assert error(found, reference("erf", x), np.float64) <= LIMITS["erf"][1] + 1


@pytest.mark.parametrize("name", ["sin", "tanh", "erf", "expm1", "log1p", "asinh", "atan", "tan"])
def test_odd_functions_keep_the_sign_of_zero(name):
    zeros = np.array([0.0, -0.0], "f4")
    found = lanewise("host", lambda f, v: getattr(math, name)(f, v), zeros)
    assert np.signbit(found).tolist() == [False, True] and not found.any()


def pairs(dtype):
    rng = np.random.default_rng(1)
    special = [0, -0.0, 1, -1, 2, -2, 3, -3, 0.5, -0.5, np.inf, -np.inf, np.nan, 1e-40, 1e30]
    x, y = (grid.ravel() for grid in np.meshgrid(special, special))
    x = np.concatenate([x, rng.uniform(-20, 20, 3000), np.exp(rng.uniform(-80, 80, 3000))])
    y = np.concatenate([y, np.rint(rng.uniform(-20, 20, 3000)), rng.uniform(-2, 2, 3000)])
    return x.astype(dtype), y.astype(dtype)


@pytest.mark.parametrize("target", WIDTHS)
def test_pow(target):
    with np.errstate(all="ignore"):
        x, y = pairs(np.float32)
        found = lanewise(target, math.pow_, x, y)
        assert error(found, np.power(x.astype("f8"), y.astype("f8")), np.float32) <= 1
        x, y = pairs(np.float64)
        found, expected = lanewise(target, math.pow_, x, y), np.power(x, y)
        finite = np.isfinite(expected) & (np.abs(expected) > 1e-300)
        rest = ~finite & (expected != 0)
        np.testing.assert_array_equal(found[rest], expected[rest])
        exponent = np.abs(np.log(np.abs(x[finite])) * y[finite])
        off = np.abs(found[finite] / expected[finite] - 1)
        assert (off <= 2.0**-51 * (2 + np.nan_to_num(exponent, posinf=0))).all()


@pytest.mark.parametrize("target", WIDTHS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_remainders_are_exact(target, dtype):
    x, y = pairs(dtype)
    with np.errstate(all="ignore"):
        x[-3000:] *= dtype(1e6)
        found, expected = lanewise(target, math.remainder, x, y), np.fmod(x, y)
    np.testing.assert_array_equal(found, expected)


def test_a_remainder_by_a_scalar():
    x = np.linspace(-9, 9, 37).astype(np.float32)
    found = lanewise("host", lambda f, v: math.remainder(f, v, f.const(f32, 0.75)), x)
    np.testing.assert_array_equal(found, np.fmod(x, np.float32(0.75)))
