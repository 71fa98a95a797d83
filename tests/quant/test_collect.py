"""Calibration statistics of each quantization point, compared with numpy."""

import numpy as np
import pytest
from small_models import all_learned

import bitwright as bw
from bitwright.ops.core.builder import Builder
from bitwright.quant.calibration.blas import _openblas, products_on_one_thread
from bitwright.quant.calibration.run import CalibrationRun
from bitwright.quant.data.batches import Batches
from bitwright.quant.model.points import find_points


def model(rng):
    """Convolutions and products whose inputs are of any sign, never negative, or clipped."""
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    b = Builder()
    x = b.input("x", "f32[1, 4, 9, 9]")
    h = b.relu(b.conv(x, draw(6, 4, 3, 3), name="first"))
    h = b.clip(b.conv(h, draw(6, 1, 3, 3), groups=6, name="deep"), np.float32(0), np.float32(1))
    h = b.clip(b.conv(h, draw(5, 6, 1, 1), name="third"), np.float32(-1), np.float32(1))
    h = b.conv(h, draw(3, 5, 1, 1), name="fourth")
    y = b.matmul(b.reshape(h, np.array([3, 25])), draw(25, 7), name="last")
    graph = b.build(y=y)
    values = [(s.name, s.values[0]) for s in find_points(graph) if s.name != "x"]
    return graph, graph.with_(outputs=tuple(values))


def test_ranges_are_those_of_every_batch():
    rng = np.random.default_rng(5)
    graph, open_graph = model(rng)
    data = [{"x": rng.normal(size=(1, 4, 9, 9)).astype(np.float32)} for _ in range(40)]
    calibration = CalibrationRun(
        graph, find_points(graph), Batches(all_learned(data), graph), None, 2
    )
    calibration.run(False)
    exe = bw.compile(open_graph, threads=2)
    seen = [{**exe.run(batch), **batch} for batch in data]
    assert len(calibration.stats) == 5
    for name, stats in calibration.stats.items():
        axes = tuple(
            i for i in range(seen[0][name].ndim) if i != stats.point.products[0].channel_axis
        )
        low = np.minimum(0, np.min([s[name].min(axis=axes) for s in seen], axis=0))
        high = np.maximum(0, np.max([s[name].max(axis=axes) for s in seen], axis=0))
        assert stats.point.channels == len(low)
        np.testing.assert_allclose(stats.every.low, low, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(stats.every.high, high, rtol=1e-5, atol=1e-6)


def gathered(graph, data):
    calibration = CalibrationRun(
        graph, find_points(graph), Batches(all_learned(data), graph), None, 2
    )
    calibration.run(False)
    return calibration.stats


def test_rows_are_those_of_the_values():
    rng = np.random.default_rng(6)
    graph, open_graph = model(rng)
    batch = {"x": rng.normal(size=(1, 4, 9, 9)).astype(np.float32)}
    values = {**bw.compile(open_graph).run(batch), **batch}
    stats = gathered(graph, [batch])
    for name, found in stats.items():
        (product,), (sample,) = found.point.products, found.samples.values()
        rows = product.rows(values[name], 10**6, rng)  # all of them, in another order
        assert sample.counted == len(rows)
        want = np.einsum("rgk,rgj->gkj", rows, rows) / len(rows)
        np.testing.assert_allclose(sample.second_moment, want, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(sample.mean, rows.mean(axis=0), rtol=1e-4, atol=1e-5)


def test_values_of_data_dependent_size_and_empty_values():
    rng = np.random.default_rng(7)
    b = Builder()
    x, past = b.input("x", "f32[n, 6]"), b.input("past", "f32[m, 6]")
    positive = b.gt(b.reduce_sum(x, axes=[1], keepdims=False), 0.0)
    chosen = b.gather_nd(x, b.transpose(b.nonzero(positive), perm=(1, 0)))
    weight = rng.normal(size=(6, 4)).astype(np.float32)
    graph = b.build(y=b.matmul(chosen, weight), z=b.matmul(past, weight.copy()))
    draw = lambda count: rng.normal(size=(count, 6)).astype(np.float32)
    data = [{"x": draw(5), "past": draw(count)} for count in (3, 0, 2, 0)]
    stats = gathered(graph, data)
    assert stats["past"].samples.popitem()[1].counted == 5
    counted = sum(int((batch["x"].sum(axis=1) > 0).sum()) for batch in data)
    (found,) = (e for name, e in stats.items() if name != "past")
    assert found.samples.popitem()[1].counted == counted
    high = np.max([batch["x"][batch["x"].sum(axis=1) > 0].max(axis=0) for batch in data], axis=0)
    np.testing.assert_allclose(found.every.high, np.maximum(high, 0))


def test_numpy_matmul_gets_its_threads_back():
    if _openblas() is None:
        pytest.skip("numpy has another library of products")
    count, _ = _openblas()
    before = count()
    with pytest.raises(ZeroDivisionError), products_on_one_thread():
        assert count() == 1
        raise ZeroDivisionError
    assert count() == before


@pytest.mark.parametrize("ends, is_kept", [((0, 6), False), ((0, -1), True), ((-1, 6), True)])
def test_a_clip_is_never_negative_where_both_ends_are_not(ends, is_kept):
    b = Builder()
    low, high = (np.float32(end) for end in ends)
    x = b.clip(b.input("x", "f32[n, 3]"), low, high)
    graph = b.build(y=b.matmul(x, np.ones((3, 2), np.float32)))
    data = [{"x": np.full((4, 3), value, np.float32)} for value in (-5, 5)]
    (found,) = gathered(graph, data).values()
    assert (found.every.low < 0).all() == is_kept
