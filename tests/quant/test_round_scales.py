"""Scales rounded to few bits: near the original, and exact in f32."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_models import all_learned

import bitwright as bw
from bitwright.quant.calibration.run import CalibrationRun
from bitwright.quant.data.batches import Batches
from bitwright.quant.model.assign import Choice
from bitwright.quant.model.points import find_points
from bitwright.quant.model.transforms.power_of_two_scales import use_power_of_two_scales
from bitwright.quant.model.weights.choose import ActivationQuant, static_activation
from bitwright.quant.model.weights.nearest import Range
from bitwright.quant.model.weights.round_scales import (
    FACTOR_BITS,
    SCALE_BITS,
    SUM_BITS,
    nearest_power,
    round_scales_for_sums,
    rounded,
    rounded_down,
    rounded_up,
)
from bitwright.quant.model.weights.weights import WeightFormat, quantize_weights

POSITIVE = st.floats(2.0**-100, 2.0**100)


def has_bits(x, bits):
    mantissa, _ = np.frexp(x)
    whole = np.ldexp(mantissa, bits)
    return bool((whole == np.rint(whole)).all())


@given(POSITIVE, st.integers(1, 24))
def test_rounding_to_bits_gives_the_neighbours(x, bits):
    low, near, high = (f(x, bits) for f in (rounded_down, rounded, rounded_up))
    assert low <= x <= high and near in (low, high)
    assert abs(near - x) == min(x - low, high - x)
    assert high - low <= x * 2.0 ** (1 - bits)
    assert all(has_bits(found, bits) for found in (low, near, high))


@given(POSITIVE)
def test_nearest_power_of_two(x):
    power = float(nearest_power(x))
    assert has_bits(power, 1) and 0.7 < x / power < 1.42


@pytest.mark.parametrize("terms", [1, 9, 960])
def test_sums_with_such_scales_are_exact_in_any_order(terms):
    rng = np.random.default_rng(terms)
    scales = round_scales_for_sums(rng.uniform(1e-3, 1e-2, 50).astype(np.float32), terms, 127)
    assert has_bits(scales, SCALE_BITS)
    qvalues = rng.integers(-40, 41, (50, terms)), rng.integers(-128, 128, (50, terms))
    assert np.abs(np.cumsum(qvalues[0] * qvalues[1], axis=1)).max() < 2**SUM_BITS
    left = (qvalues[0] * np.float32(0.25)).astype(np.float32)
    right = (qvalues[1] * scales.astype(np.float32)[:, None]).astype(np.float32)
    exact = (qvalues[0] * qvalues[1]).sum(axis=1) * scales * 0.25
    for order in (slice(None), slice(None, None, -1), rng.permutation(terms)):
        total = np.cumsum((left * right)[:, order], axis=1, dtype=np.float32)[:, -1]
        np.testing.assert_array_equal(total, exact)


def test_a_scale_is_rounded_down_only_for_many_terms():
    scales = np.full(1, 0.0102, np.float32)
    assert (
        round_scales_for_sums(scales, 9, 127)[0]
        > scales[0]
        > round_scales_for_sums(scales, 10**6, 127)[0]
    )


def test_factors_absorb_the_rest_of_a_power_of_two():
    factors = np.array([1.0, 0.3, 0.07], np.float32)
    before = ActivationQuant("static", factors, Range(np.float32(0.0123), 17), 0.0)
    after = before.with_power_of_two(3)
    assert has_bits(after.range.scale, 1) and after.range.zero_point == 17
    assert has_bits(after.inverse, FACTOR_BITS)
    units = after.factors * after.range.scale
    np.testing.assert_allclose(units, factors * np.float32(0.0123), rtol=2.0**-FACTOR_BITS)


def stats_of(graph, data):
    calibration = CalibrationRun(
        graph, find_points(graph), Batches(all_learned(data), graph), None, 1
    )
    calibration.run(False)
    (found,) = calibration.stats.values()
    return found


@pytest.mark.parametrize("tail, seed, clip_ratio", [(3, 1, 0.75), (8, 2, 1.25)])
def test_ranges_of_smoothed_channels_are_compared_by_their_error(tail, seed, clip_ratio):
    rng = np.random.default_rng(seed)
    b = bw.Builder()
    weight = rng.normal(size=(32, 64)).astype(np.float32)
    graph = b.build(y=b.matmul(b.input("x", "f32[n, 32]"), weight))
    sizes = 10 ** rng.uniform(-1.5, 0, 32)
    batch = lambda: {"x": (rng.standard_t(tail, (256, 32)) * sizes).astype(np.float32)}
    stats = stats_of(graph, [batch() for _ in range(8)])
    activation = static_activation(stats)
    assert has_bits(activation.range.scale, 1) and activation.clip_ratio == clip_ratio
    undivided = static_activation(stats, smooth=False)
    assert undivided.factors is None and has_bits(undivided.range.scale, FACTOR_BITS)


def test_scales_of_dynamic_inputs_are_not_rounded():
    rng = np.random.default_rng(3)
    b = bw.Builder()
    weight = rng.normal(size=(8, 4, 3, 3)).astype(np.float32)
    graph = b.build(y=b.conv(b.input("x", "f32[1, 4, 9, 9]"), weight))
    stats = stats_of(graph, [{"x": rng.normal(size=(1, 4, 9, 9)).astype(np.float32)}] * 2)
    range_ = Range(np.float32(0.02), 128)
    for scheme, round_scales, bits in (
        ("static", True, SCALE_BITS),
        ("static", False, FACTOR_BITS),
        ("dynamic_per_tensor", True, 24),
    ):
        form = WeightFormat(ranges="peak", round_scales=round_scales)
        activation = ActivationQuant(scheme, None, range_, 0.0)
        (made,) = quantize_weights(stats, activation, form).values()
        assert has_bits(made.scales, bits) and not has_bits(made.scales, bits // 2)


@pytest.mark.parametrize("highest, is_exact", [(5.9, False), (6.1, True)])
def test_a_clip_inside_the_quantized_range_needs_a_power_of_two_scale(highest, is_exact):
    rng = np.random.default_rng(4)
    b = bw.Builder()
    weight = rng.normal(size=(8, 8, 1, 1)).astype(np.float32)
    between = b.clip(b.conv(b.input("x", "f32[1, 8, 5, 5]"), weight), 0.0, 6.0)
    graph = b.build(y=b.conv(between, weight.copy()))
    choices = [
        Choice(
            point, "static", "", ActivationQuant("static", None, Range(rounded_down(scale), 0), 0.0)
        )
        for point, scale in zip(find_points(graph), (0.02, highest / 255), strict=True)
    ]
    first, second = use_power_of_two_scales(graph, choices)
    assert has_bits(first.activation.range.scale, 1) is is_exact
    assert has_bits(second.activation.range.scale, 1)  # a result of the model stays real
