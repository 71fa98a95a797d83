"""Calibration methods against brute force on known distributions."""

import numpy as np
import pytest

from bitwright.errors import QuantizationError
from bitwright.quant import Percentile, Statistics, choose
from bitwright.quant.calibration.methods import expected_error

RNG = np.random.default_rng(7)
N = 12_000
DATA = {
    "normal": RNG.normal(size=N),
    "laplace": RNG.laplace(size=N),
    "student": RNG.standard_t(3, size=N),
    "uniform": RNG.uniform(-1, 3, size=N),
    "relu": np.maximum(RNG.normal(size=N), 0),
    "lognormal": RNG.lognormal(size=N),
    "outlier": np.append(RNG.normal(size=N - 1), 100),
}


def statistics_of(x, axis=None):
    found = Statistics(axis)
    found.add(x)
    return found


def mean_error(x, scale, zero_point, low, high):
    """The mean squared error of a plain integer quantizer, written independently."""
    q = np.minimum(np.maximum(np.round(x / scale) + zero_point, low), high)
    return np.mean(((q - zero_point) * scale - x) ** 2)


def brute_symmetric(x, low, high):
    top = np.abs(x).max()
    return min(mean_error(x, top * f / high, 0, low, high) for f in np.geomspace(0.01, 1, 160))


def brute_asymmetric(x, low, high):
    best = np.inf
    bottoms = x.min() * np.linspace(0.05, 1, 24) if x.min() < 0 else [0.0]
    for bottom in bottoms:
        for top in max(x.max(), 0) * np.geomspace(0.03, 1, 40):
            scale = (top - bottom) / (high - low)
            zero = min(max(round(low - bottom / scale), low), high)
            best = min(best, mean_error(x, scale, zero, low, high))
    return best


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("kind, low, high", [("int8", -128, 127), ("int4", -8, 7), ("int2", -2, 1)])
def test_mse_is_within_one_percent_of_the_best_symmetric_range(name, kind, low, high):
    x = DATA[name].astype(np.float32)
    found = choose(statistics_of(x), kind, "symmetric", "mse")
    error = mean_error(x, float(found.scale), 0, low, high)
    assert error <= 1.01 * brute_symmetric(x, low, high)


@pytest.mark.parametrize("name", ["normal", "student", "relu", "lognormal", "outlier"])
@pytest.mark.parametrize("kind, low, high", [("uint8", 0, 255), ("int4", -8, 7)])
def test_mse_is_within_one_percent_of_the_best_asymmetric_range(name, kind, low, high):
    x = DATA[name].astype(np.float32)
    found = choose(statistics_of(x), kind, "asymmetric", "mse")
    error = mean_error(x, float(found.scale), int(found.zero_point), low, high)
    assert error <= 1.01 * brute_asymmetric(x, low, high)


@pytest.mark.parametrize("name", ["normal", "student", "lognormal"])
@pytest.mark.parametrize(
    "kind, scheme",
    [("f8e4m3fn", "symmetric"), ("f4e2m1", "symmetric"), ("int4", "logarithmic")],
)
def test_mse_is_within_one_percent_of_the_best_scale_of_other_types(name, kind, scheme):
    x = DATA[name][::4]
    if scheme == "logarithmic":
        levels = np.concatenate([[0], 2.0 ** -np.arange(7)])
    else:
        qvalues = np.arange(2 ** (8 if kind == "f8e4m3fn" else 4), dtype=np.uint8)
        levels = qvalues.view(choose(statistics_of(x), kind).dtype.element.numpy).astype(np.float64)
        levels = np.unique(np.abs(levels[np.isfinite(levels)]))

    def error(scale):
        """On magnitudes, since levels are symmetric; logarithmic types round in the log domain."""
        u = np.abs(x) / scale
        if scheme == "logarithmic":
            k = np.maximum(np.round(-np.log2(u)), 0)
            return np.mean((np.where(k > 6, 0, 2.0**-k) - u) ** 2) * scale**2
        return np.mean(np.abs(u[:, None] - levels).min(1) ** 2) * scale**2

    found = choose(statistics_of(x), kind, scheme, "mse")
    top = np.abs(x).max() / levels.max()
    assert error(float(found.scale)) <= 1.01 * min(map(error, top * np.geomspace(0.02, 1, 90)))


@pytest.mark.parametrize("name", DATA)
def test_channels_of_coarser_histograms_are_within_one_percent_too(name):
    x = DATA[name].astype(np.float32)
    for kind, low, high in (("int8", -128, 127), ("int4", -8, 7)):
        found = choose(statistics_of(x[None], axis=0), kind, "symmetric", "mse")
        error = mean_error(x, float(found.scale[0]), 0, low, high)
        assert error <= 1.01 * brute_symmetric(x, low, high)


FINER = 8


def divergence(counts, middles, top, levels):
    """KL of the clipped histogram from its quantized form, level by level, for -top..top."""
    inside = np.abs(middles) <= top
    p = np.where(inside, counts, 0.0)
    first, last = np.flatnonzero(inside & (counts > 0))[[0, -1]]
    p[first : first + FINER] += counts[middles < -top].sum() / FINER
    p[last - FINER + 1 : last + 1] += counts[middles > top].sum() / FINER
    qvalues = np.clip(np.round(middles / np.float32(top / levels)), -levels - 1, levels)
    q = np.zeros(p.shape)
    held = inside & (counts > 0)
    for level in np.unique(qvalues[held]):
        own = held & (qvalues == level)
        q[own] = counts[own].mean()
    p, q = p / p.sum(), q / q.sum()
    held = p > 0
    return np.sum(p[held] * np.log(p[held] / np.maximum(q[held], 1e-12)))


@pytest.mark.parametrize("name", ["normal", "laplace", "student"])
@pytest.mark.parametrize("kind, levels", [("int8", 127), ("int4", 7)])
def test_entropy_is_near_the_lowest_divergence(name, kind, levels):
    rng = np.random.default_rng(11)
    draw = {
        "normal": rng.normal,
        "laplace": rng.laplace,
        "student": lambda size: rng.standard_t(3, size),
    }
    statistics = statistics_of(draw[name](size=200_000).astype(np.float32))
    edges, counts = statistics.edges()[0], statistics.counts[0]
    fine = np.repeat(counts / FINER, FINER)  # values spread evenly within a bin
    middles = edges[0] + (np.arange(fine.size) + 0.5) * (edges[1] - edges[0]) / FINER
    found = float(choose(statistics, kind, "symmetric", "entropy").scale) * levels
    least = (edges[1] - edges[0]) * (levels + 1)
    tops = statistics.max_abs[0] * np.geomspace(0.02, 1, 60)
    best = min(divergence(fine, middles, top, levels) for top in tops if top >= least)
    assert divergence(fine, middles, found, levels) <= 1.1 * best


@pytest.mark.parametrize("kind", ["int8", "uint4"])
@pytest.mark.parametrize("method", ["minmax", "percentile", "entropy", "mse"])
def test_the_expected_error_matches_the_measured_error(kind, method):
    x = DATA["laplace"].astype(np.float32)
    statistics = statistics_of(x)
    found = choose(statistics, kind, "asymmetric", method)
    real = mean_error(
        x, float(found.scale), int(found.zero_point), found.dtype.min, found.dtype.max
    )
    np.testing.assert_allclose(expected_error(statistics, found), real, rtol=0.02)


def test_percentiles_are_those_of_the_data():
    x = DATA["normal"].astype(np.float32)
    found = choose(statistics_of(x), "uint8", "asymmetric", "percentile(99)")
    low, high = np.percentile(x, [0.5, 99.5])
    np.testing.assert_allclose(found.scale, (high - low) / 255, rtol=0.01)
    one_sided = choose(statistics_of(np.abs(x)), "uint8", method=Percentile(99))
    np.testing.assert_allclose(one_sided.scale, np.percentile(np.abs(x), 99) / 255, rtol=0.01)
    symmetric = choose(statistics_of(x - 5), "int8", method="percentile(99)")
    np.testing.assert_allclose(symmetric.scale, -np.percentile(x - 5, 1) / 127, rtol=0.01)


def test_entropy_cuts_outliers_and_keeps_a_plain_range():
    # as many values as histograms are made of; among few, an empty bin says more than an outlier
    x = np.random.default_rng(3).normal(size=400_000).astype(np.float32)
    with_outlier = np.append(x, np.float32(60))
    for scheme in ("symmetric", "asymmetric"):
        found = choose(statistics_of(with_outlier), "int8", scheme, "entropy")
        full = choose(statistics_of(with_outlier), "int8", scheme, "minmax")
        assert found.scale < 0.6 * full.scale
    plain = np.linspace(-1, 1, 200_001)
    found = choose(statistics_of(plain), "int8", "symmetric", "entropy")
    assert found.scale > 0.95 / 127


def test_channels_are_chosen_one_by_one():
    x = np.stack([DATA[name] for name in DATA]).astype(np.float32)
    x *= 10.0 ** np.arange(-3, 4)[:, None]
    statistics = statistics_of(x, axis=0)
    for scheme in ("symmetric", "asymmetric"):
        for method in ("minmax", "percentile", "mse"):
            together = choose(statistics, "int4", scheme, method)
            for row, scale in zip(x, together.scale, strict=True):
                alone = Statistics(axis=0)
                alone.add(row[None])
                assert choose(alone, "int4", scheme, method).scale[0] == scale


def test_adaptive_uses_the_lowest_error_and_notes_it():
    statistics = statistics_of(DATA["outlier"])
    found = choose(statistics, "int4", method="adaptive")
    others = [choose(statistics, "int4", method=m) for m in ("minmax", "entropy", "mse")]
    least = min(expected_error(statistics, one)[0] for one in others)
    assert expected_error(statistics, found)[0] <= least
    assert found.notes[-1].startswith(found.method) and found.method.startswith("adaptive(")
    consumer = choose(statistics, "int4", method="adaptive", error=lambda p: -float(p.scale))
    assert consumer.method == "adaptive(minmax)"


def test_custom_functions_give_a_range():
    statistics = statistics_of(DATA["normal"])
    found = choose(statistics, "int8", method=lambda seen: (-1.27, 0.5))
    assert found.scale == np.float32(0.01) and found.method.startswith("custom")
    with pytest.raises(QuantizationError, match="did not return a range"):
        choose(statistics, "int8", method=lambda seen: None)
    with pytest.raises(QuantizationError, match="not finite"):
        choose(statistics, "int8", method=lambda seen: (0, np.inf))


def test_errors():
    with pytest.raises(QuantizationError, match="nothing was observed"):
        choose(Statistics(), "int8", method="mse")
    with pytest.raises(QuantizationError, match="no calibration method is named 'best'"):
        choose(statistics_of(np.ones(3)), "int8", method="best")
    with pytest.raises(QuantizationError, match="percentile is out of range"):
        choose(statistics_of(np.ones(3)), "int8", method="percentile(101)")
    with pytest.raises(QuantizationError, match="cannot represent negative"):
        choose(statistics_of(-np.ones(3)), "uint8", "symmetric", "mse")


@pytest.mark.parametrize("method", ["minmax", "percentile", "entropy", "mse", "adaptive"])
@pytest.mark.parametrize("value", [0.0, 2.5, -3.0])
def test_constant_tensors_come_back(method, value):
    for scheme in ("symmetric", "asymmetric"):
        found = choose(statistics_of(np.full(9, value)), "int8", scheme, method)
        error = mean_error(value, float(found.scale), int(found.zero_point), -128, 127)
        assert error <= 1e-8
