"""Scales of few bits: next to what they stand for, and exact in f32."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_models import all_learned

import bitwright as bw
from bitwright.quant.algorithms.choosing import Coding, static_coding
from bitwright.quant.algorithms.codes import Range
from bitwright.quant.algorithms.few_bits import (
    FACTOR_BITS,
    SCALE_BITS,
    SUM_BITS,
    nearest_power,
    rounded,
    rounded_down,
    rounded_up,
    scales_for_sums,
)
from bitwright.quant.algorithms.weights import WeightFormat, quantize_weights
from bitwright.quant.assign import Choice
from bitwright.quant.data import Batches
from bitwright.quant.exact_sums import make_sums_exact
from bitwright.quant.gathering import Gathering
from bitwright.quant.products import find_sites

POSITIVE = st.floats(2.0**-100, 2.0**100)


def has_bits(x, bits):
    mantissa, _ = np.frexp(x)
    whole = np.ldexp(mantissa, bits)
    return bool((whole == np.rint(whole)).all())


@given(POSITIVE, st.integers(1, 24))
def test_numbers_of_few_bits_lie_next_to_it(x, bits):
    low, near, high = (f(x, bits) for f in (rounded_down, rounded, rounded_up))
    assert low <= x <= high and near in (low, high)
    assert abs(near - x) == min(x - low, high - x)
    assert high - low <= x * 2.0 ** (1 - bits)
    assert all(has_bits(found, bits) for found in (low, near, high))


@given(POSITIVE)
def test_a_power_of_two_is_the_next_one(x):
    power = float(nearest_power(x))
    assert has_bits(power, 1) and 0.7 < x / power < 1.42


@pytest.mark.parametrize("terms", [1, 9, 960])
def test_sums_with_such_scales_are_exact_in_any_order(terms):
    rng = np.random.default_rng(terms)
    scales = scales_for_sums(rng.uniform(1e-3, 1e-2, 50).astype(np.float32), terms, 127)
    assert has_bits(scales, SCALE_BITS)
    codes = rng.integers(-40, 41, (50, terms)), rng.integers(-128, 128, (50, terms))
    assert np.abs(np.cumsum(codes[0] * codes[1], axis=1)).max() < 2**SUM_BITS
    left = (codes[0] * np.float32(0.25)).astype(np.float32)
    right = (codes[1] * scales.astype(np.float32)[:, None]).astype(np.float32)
    exact = (codes[0] * codes[1]).sum(axis=1) * scales * 0.25
    for order in (slice(None), slice(None, None, -1), rng.permutation(terms)):
        total = np.cumsum((left * right)[:, order], axis=1, dtype=np.float32)[:, -1]
        np.testing.assert_array_equal(total, exact)


def test_a_scale_is_lowered_only_where_many_terms_gain_by_it():
    scales = np.full(1, 0.0102, np.float32)
    assert scales_for_sums(scales, 9, 127)[0] > scales[0] > scales_for_sums(scales, 10**6, 127)[0]


def test_factors_take_up_what_a_power_of_two_leaves():
    factors = np.array([1.0, 0.3, 0.07], np.float32)
    before = Coding("static", factors, Range(np.float32(0.0123), 17), 0.0)
    after = before.with_power_of_two(3)
    assert has_bits(after.range.scale, 1) and after.range.zero_point == 17
    assert has_bits(after.inverse, FACTOR_BITS)
    units = after.factors * after.range.scale
    np.testing.assert_allclose(units, factors * np.float32(0.0123), rtol=2.0**-FACTOR_BITS)


def evidence_of(graph, data):
    gathering = Gathering(graph, find_sites(graph), Batches(all_learned(data), graph), None, 1)
    gathering.run(False)
    (found,) = gathering.evidence.values()
    return found


@pytest.mark.parametrize("tail, seed, reach", [(3, 1, 0.75), (8, 2, 1.25)])
def test_ranges_of_divided_channels_are_compared_by_the_error_that_they_make(tail, seed, reach):
    rng = np.random.default_rng(seed)
    b = bw.Builder()
    weight = rng.normal(size=(32, 64)).astype(np.float32)
    graph = b.build(y=b.matmul(b.input("x", "f32[n, 32]"), weight))
    sizes = 10 ** rng.uniform(-1.5, 0, 32)
    batch = lambda: {"x": (rng.standard_t(tail, (256, 32)) * sizes).astype(np.float32)}
    evidence = evidence_of(graph, [batch() for _ in range(8)])
    coding = static_coding(evidence)
    assert has_bits(coding.range.scale, 1) and coding.reach == reach
    undivided = static_coding(evidence, smooth=False)
    assert undivided.factors is None and has_bits(undivided.range.scale, FACTOR_BITS)


def test_scales_have_all_their_bits_where_the_run_finds_ranges():
    rng = np.random.default_rng(3)
    b = bw.Builder()
    weight = rng.normal(size=(8, 4, 3, 3)).astype(np.float32)
    graph = b.build(y=b.conv(b.input("x", "f32[1, 4, 9, 9]"), weight))
    evidence = evidence_of(graph, [{"x": rng.normal(size=(1, 4, 9, 9)).astype(np.float32)}] * 2)
    range_ = Range(np.float32(0.02), 128)
    for scheme, exact_sums, bits in (
        ("static", True, SCALE_BITS),
        ("static", False, FACTOR_BITS),
        ("dynamic-tensor", True, 24),
    ):
        form = WeightFormat(ranges="peak", exact_sums=exact_sums)
        coding = Coding(scheme, None, range_, 0.0)
        (made,) = quantize_weights(evidence, coding, form).values()
        assert has_bits(made.scales, bits) and not has_bits(made.scales, bits // 2)


@pytest.mark.parametrize("highest, is_exact", [(5.9, False), (6.1, True)])
def test_a_clip_that_codes_do_not_do_needs_exact_sums(highest, is_exact):
    rng = np.random.default_rng(4)
    b = bw.Builder()
    weight = rng.normal(size=(8, 8, 1, 1)).astype(np.float32)
    between = b.clip(b.conv(b.input("x", "f32[1, 8, 5, 5]"), weight), 0.0, 6.0)
    graph = b.build(y=b.conv(between, weight.copy()))
    choices = [
        Choice(site, "static", "", Coding("static", None, Range(rounded_down(scale), 0), 0.0))
        for site, scale in zip(find_sites(graph), (0.02, highest / 255), strict=True)
    ]
    first, second = make_sums_exact(graph, choices)
    assert has_bits(first.coding.range.scale, 1) is is_exact
    assert has_bits(second.coding.range.scale, 1)  # a result of the model stays real
