"""GPTQ and adaptive rounding, compared with nearest and with all roundings."""

import itertools
import tracemalloc

import numpy as np
import pytest

import bitwright as bw
from bitwright.quant.calibration.model_outputs import Channels
from bitwright.quant.calibration.stats import CalibrationStats, Sample
from bitwright.quant.model.points import find_points
from bitwright.quant.model.weights import weights as weights_module
from bitwright.quant.model.weights.adaround import CoordinateDescent
from bitwright.quant.model.weights.gptq import Gptq, damping
from bitwright.quant.model.weights.nearest import weight_qvalues, weight_scales
from bitwright.quant.model.weights.weights import WeightFormat, quantize_weights


def correlated_rows(rng, count, groups, terms):
    mix = rng.normal(size=(groups, terms, terms)) / np.sqrt(terms)
    return np.einsum("rgk,gkj->rgj", rng.normal(size=(count, groups, terms)), mix).astype("f4")


def gram_of(rows):
    return np.einsum("rgk,rgj->gkj", rows, rows) / len(rows)


def error(rows, matrix, held):
    return float((np.einsum("rgk,gnk->rgn", rows, matrix - held) ** 2).sum())


def all_errors(rows, matrix, scales, limit):
    """The errors of all roundings of one column within one scale of its weights."""
    below = np.floor(matrix / scales)
    tries = [below + up for up in itertools.product((0, 1), repeat=matrix.shape[2])]
    return [error(rows, matrix, np.clip(c, -limit, limit) * scales) for c in tries]


@pytest.mark.parametrize("groups, columns, terms", [(1, 1, 1), (1, 7, 33), (3, 2, 9), (1, 40, 127)])
@pytest.mark.parametrize("limit", [127, 7, 1])
def test_gptq_beats_nearest_rounding(groups, columns, terms, limit):
    rng = np.random.default_rng(terms)
    rows = correlated_rows(rng, 4 * terms + 8, groups, terms)
    matrix = rng.normal(size=(groups, columns, terms)).astype(np.float32)
    scales = weight_scales(matrix, limit)
    found = Gptq(gram_of(rows)).qvalues(matrix, scales, limit, -limit)
    assert np.array_equal(found, np.rint(found)) and np.abs(found).max() <= limit
    nearest = error(rows, matrix, weight_qvalues(matrix, scales, limit) * scales)
    assert error(rows, matrix, found * scales) <= nearest * (1 + 1e-3)


def test_gptq_is_near_the_best_of_all_roundings():
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(20):
        rows = correlated_rows(rng, 64, 1, 8)
        matrix = rng.normal(size=(1, 1, 8)).astype(np.float32)
        scales = weight_scales(matrix, 7)
        best = min(all_errors(rows, matrix, scales, 7))
        found = Gptq(gram_of(rows)).qvalues(matrix, scales, 7, -7)
        nearest = error(rows, matrix, weight_qvalues(matrix, scales, 7) * scales)
        ratios.append((error(rows, matrix, found * scales) / best, nearest / best))
    spread, nearest = np.mean(ratios, axis=0)
    assert spread < 2 < nearest


def stats_of(*weights, seed=0):
    """A point of products with these weights, and its statistics for correlated rows."""
    rng = np.random.default_rng(seed)
    terms = weights[0].shape[0]
    b = bw.Builder()
    x = b.input("x", f"f32[n, {terms}]")
    graph = b.build(**{f"y{i}": b.matmul(x, w) for i, w in enumerate(weights)})
    (point,) = find_points(graph)
    rows = correlated_rows(rng, 4 * terms, 1, terms)
    sample = Sample.of(rows)
    sample.add(rows, 64)
    channels = Channels.of(rows, 2)
    return CalibrationStats(point, channels, channels, {point.products[0].window_key: sample})


@pytest.mark.parametrize(
    "form", [WeightFormat(), WeightFormat(4, 16), WeightFormat(8, 0, "nearest")]
)
def test_columns_in_chunks_equal_all_at_once(form, monkeypatch):
    rng = np.random.default_rng(0)
    stats = stats_of(*(rng.normal(size=(40, n)).astype(np.float32) for n in (5, 33, 1)))
    whole = quantize_weights(stats, None, form)
    monkeypatch.setattr(weights_module, "WEIGHTS_AT_ONCE", 40 * 4)
    for name, part in quantize_weights(stats, None, form).items():
        qvalues = [x.qvalues.astype(np.int32) for x in (part, whole[name])]
        assert (qvalues[0] == qvalues[1]).mean() > 0.99  # products of other widths round otherwise
        np.testing.assert_array_equal(part.scales, whole[name].scales)
        np.testing.assert_allclose(part.error, whole[name].error, rtol=0.1)
        assert part.correction.shape == whole[name].correction.shape


def test_memory_does_not_grow_with_the_width_of_a_layer():
    stats = stats_of(np.random.default_rng(0).normal(size=(64, 1 << 17)).astype(np.float32))
    size = 4 * 64 << 17
    tracemalloc.start()
    quantize_weights(stats, None, WeightFormat())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * size  # two copies of the integers, and a chunk of them in float


def test_coordinate_descent_is_nearly_the_best_of_all_roundings():
    rng = np.random.default_rng(1)
    ratios = []
    for _ in range(20):
        rows = correlated_rows(rng, 64, 1, 8)
        matrix = rng.normal(size=(1, 1, 8)).astype(np.float32)
        scales = weight_scales(matrix, 7)
        found = CoordinateDescent(gram_of(rows)).qvalues(matrix, scales, 7, -7)
        ratios.append(
            error(rows, matrix, found * scales) / min(all_errors(rows, matrix, scales, 7))
        )
    assert np.mean(ratios) < 1.3 and np.median(ratios) < 1.05


@pytest.mark.parametrize("groups, columns, terms", [(1, 1, 1), (2, 5, 17), (1, 40, 127), (8, 1, 9)])
@pytest.mark.parametrize("highest, lowest", [(127, -127), (7, -8), (1, -2)])
def test_coordinate_descent_only_lowers_the_error_of_each_column(
    groups, columns, terms, highest, lowest
):
    rng = np.random.default_rng(terms)
    rows = correlated_rows(rng, 8 * terms + 8, groups, terms)
    unseen = correlated_rows(np.random.default_rng(terms), 8 * terms + 8, groups, terms)
    matrix = rng.normal(size=(groups, columns, terms)).astype(np.float32)
    scales = weight_scales(matrix, highest) * np.float32(0.9)
    gram = gram_of(rows)
    damped = gram + np.eye(terms) * damping(gram)[:, :, None]
    lost = lambda qvalues: matrix - qvalues * scales
    errors = lambda qvalues: np.einsum("gnk,gkj,gnj->gn", lost(qvalues), damped, lost(qvalues))
    nearest = weight_qvalues(matrix, scales, highest, lowest)
    spread = Gptq(gram).qvalues(matrix, scales, highest, lowest)
    found = CoordinateDescent(gram).qvalues(matrix, scales, highest, lowest)
    assert np.array_equal(found, np.clip(np.rint(found), lowest, highest))
    least = np.minimum(errors(nearest), errors(spread))
    assert (errors(found) <= least * (1 + 1e-3) + 1e-7).all()
    few = range(terms if terms < 100 else 0)  # of many terms the last steps are not waited for
    for k, step in itertools.product(few, (-1, 1)):  # no single code improves it
        other = found.copy()
        other[:, :, k] = np.clip(other[:, :, k] + step, lowest, highest)
        assert (errors(other) >= errors(found) * (1 - 1e-3)).all()
    assert error(unseen, matrix, found * scales) <= error(unseen, matrix, nearest * scales) * 1.001


@pytest.mark.parametrize("rounding", ["nearest", "gptq", "adaround"])
@pytest.mark.parametrize("bits, block", [(8, 0), (4, 16), (4, 0), (2, 16)])
def test_searched_ranges_never_measure_worse(rounding, bits, block):
    rng = np.random.default_rng(0)
    matrix = rng.standard_t(4, size=(48, 40)).astype(np.float32)
    stats = stats_of(matrix)
    errors = {}
    for ranges in ("peak", "mse"):
        form = WeightFormat(bits, block, rounding, ranges=ranges)
        (made,) = quantize_weights(stats, None, form).values()
        qvalues = made.qvalues.astype(np.int32)
        assert form.lowest <= qvalues.min() and qvalues.max() <= form.highest
        errors[ranges] = made.error
    assert errors["mse"] <= errors["peak"] * 1.0001
    if bits < 8:
        assert errors["mse"] < 0.9 * errors["peak"]


@pytest.mark.parametrize("groups, terms", [(1, 1), (3, 9), (1, 64), (2, 65), (1, 200)])
def test_gptq_uses_the_root_of_the_inverse(groups, terms):
    gram = gram_of(correlated_rows(np.random.default_rng(0), terms // 2 + 2, groups, terms))
    spread = Gptq(gram)
    damped = gram + np.eye(terms) * damping(gram)[:, :, None]
    for own, upper, order in zip(damped, spread.upper, spread.order, strict=True):
        assert np.abs(np.tril(upper, -1)).max(initial=0) < 1e-9
        transposed = own[np.ix_(order, order)].astype(np.float64)
        wide = upper.astype(np.float64)
        np.testing.assert_allclose(wide.T @ wide @ transposed, np.eye(terms), atol=1e-3)


def test_f64_is_used_where_f32_is_singular(monkeypatch):
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(200, 70))
    gram = (rows.T @ rows / 200).astype(np.float32)[None]
    scale = np.full((1, 20, 1), 0.05, np.float32)
    matrix = rng.normal(size=(1, 20, 70)).astype(np.float32)
    plain, cholesky, asked = Gptq(gram), np.linalg.cholesky, set()

    def singular_in_f32(a):
        asked.add(a.dtype.name)
        if a.dtype == np.float32:
            raise np.linalg.LinAlgError
        return cholesky(a)

    monkeypatch.setattr(np.linalg, "cholesky", singular_in_f32)
    found = Gptq(gram)
    assert asked == {"float32", "float64"} and found.upper.dtype == np.float32
    np.testing.assert_allclose(found.upper, plain.upper, atol=1e-4)
    qvalues = found.qvalues(matrix, scale, 127, -127)
    assert (qvalues == plain.qvalues(matrix, scale, 127, -127)).mean() > 0.99
