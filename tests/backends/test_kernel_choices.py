"""Tuned kernel parameters: candidates give the same bits, and remembered ones are used."""

import numpy as np
import pytest

import bitwright as bw
from bitwright.backends.cpu.kernels.matmul.register_tile import best_tile, candidate_tiles
from bitwright.backends.cpu.lowering import choices
from bitwright.backends.cpu.lowering.choices import Choices
from bitwright.pipeline import compile_graph
from bitwright.target import host, named

RNG = np.random.default_rng(5)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BITWRIGHT_CACHE", str(tmp_path))
    monkeypatch.delenv("BITWRIGHT_TUNED", raising=False)


def products():
    """A convolution, a depthwise convolution and a matmul in f32, with odd sizes."""
    b = bw.Builder("products")
    x = b.input("x", "f32[n, 3, 9, 9]")
    x = b.relu(b.conv(x, b.parameter("w1", draw(21, 3, 3, 3)), pads=[1, 1, 1, 1]))
    x = b.conv(x, b.parameter("w2", draw(21, 1, 3, 3)), pads=[1, 1, 1, 1], groups=21)
    rows = b.reshape(x, shape=(x.shape[0], 21 * 81))
    return b.build(y=b.matmul(rows, b.parameter("w3", draw(21 * 81, 37)))), {"x": draw(5, 3, 9, 9)}


def draw(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def int8_products():
    graph, feeds = products()
    return bw.quantize(graph, [feeds], "int8-static").graph, feeds


def variants(points):
    """Chosen candidates so that every candidate of every point occurs."""
    for number in range(1, max(len(p.candidates) for p in points.values())):
        yield {k: p.candidates[number] for k, p in points.items() if number < len(p.candidates)}


@pytest.mark.parametrize("make", [products, int8_products])
@pytest.mark.parametrize("precision", ["f32", "mixed_bf16"])
def test_every_candidate_gives_the_same_bits(make, precision):
    graph, feeds = make()
    with choices.using(Choices()) as static:
        expected = compile_graph(graph, precision=precision).run(feeds)["y"]
    count = 0
    for chosen in variants(static.points):
        with choices.using(Choices(chosen)):
            found = compile_graph(graph, threads=1 + count % 3, precision=precision).run(feeds)["y"]
        np.testing.assert_array_equal(found, expected)
        count += 1
    assert count >= 2


@pytest.mark.parametrize("name", ["avx2", "sse2"])
def test_candidates_fit_the_registers_and_begin_with_the_static_choice(name):
    target = named(name)
    for columns in (0, 1, 16, 100, 1000):
        for fused, extra in ((None, 0), (False, 0), (True, 1)):
            tiles = candidate_tiles(target, columns, fused, extra)
            assert tiles[0] == best_tile(target, columns, fused, extra)
            assert len(set(tiles)) == len(tiles)
            for tile in tiles:
                assert tile.rows * (tile.vectors + extra) < target.vector_registers


def test_tuning_measures_every_point_and_remembers_only_what_is_faster():
    graph, feeds = products()
    found = bw.tune_kernels(graph, feeds, threads=1)
    assert found.stopped == "all candidates measured" and len(found.points) == 3
    for point in found.points:
        assert point.best in point.seconds and len(point.seconds) >= 3
    assert choices.remembered(host()) == found.chosen
    assert found.is_faster or not found.chosen
    assert "choices measured with 1 threads" in str(found)
    assert found.to_dict()["threads"] == 1


def test_remembered_candidates_are_used_and_change_the_key_of_cached_models(tmp_path):
    graph, feeds = products()
    with choices.using(Choices()) as static:
        expected = compile_graph(graph).run(feeds)["y"]
    path = tmp_path / "model.bw"
    graph.save(path)
    bw.compile(path)
    before = choices.digest(host())
    chosen = next(variants(static.points))
    choices.remember(host(), chosen)
    assert choices.digest(host()) != before
    asked = choices.active(host())
    assert asked.chosen == chosen
    np.testing.assert_array_equal(bw.compile(path).run(feeds)["y"], expected)


def test_unknown_and_damaged_entries_are_ignored(monkeypatch):
    graph, feeds = products()
    with choices.using(Choices()) as static:
        compile_graph(graph)
    choices.remember(host(), dict.fromkeys(static.points, "99x99 block 1"))
    bw.compile(graph).run(feeds)
    cache = choices.default_cache()
    cache.write_entry(choices.key(choices._ENTRY, host()), b"[1, 2")
    assert choices.remembered(host()) == {}
    choices.remember(host(), {"a": "b"})
    monkeypatch.setenv("BITWRIGHT_TUNED", "off")
    assert choices.remembered(host()) == {}


def test_budget_stops_the_search_and_must_be_positive():
    graph, feeds = products()
    found = bw.tune_kernels(graph, feeds, budget=1e-9, threads=1)
    assert found.points == [] and "budget" in found.stopped
    with pytest.raises(bw.BitwrightError, match="budget must be positive"):
        bw.tune_kernels(graph, feeds, budget=0)


def test_a_model_without_choices_has_nothing_to_tune():
    b = bw.Builder("plain")
    graph = b.build(y=b.relu(b.input("x", "f32[4]")))
    found = bw.tune_kernels(graph, {"x": np.ones(4, np.float32)}, threads=1)
    assert found.points == [] and not found.is_faster
