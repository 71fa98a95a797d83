"""Regions and layout of the graph picture."""

from itertools import pairwise

import numpy as np
import pytest

import bitwright as bw
from bitwright.report.html.layout import LONGEST, layered
from bitwright.report.html.regions import find_regions


def chain(b, x, width, name):
    w = np.ones((width, width), np.float32)
    return b.relu(b.add(b.matmul(x, w, name=name), np.ones(width, np.float32)))


def residual_model():
    b = bw.Builder("residual")
    x = b.input("x", "f32[batch, 4]")
    first = chain(b, x, 4, "first")
    second = chain(b, first, 4, "second")
    return b.build(y=b.softmax(b.add(second, first), axis=-1))


def names(found):
    return [[node.op for node in region.nodes] for region in found.regions]


def test_regions_join_what_only_continues_a_product():
    found = find_regions(residual_model())
    assert names(found) == [
        ["input"],
        ["matmul", "add", "relu"],
        ["matmul", "add", "relu", "add"],
        ["softmax"],
    ]
    assert [region.anchor.name for region in found.regions][1:3] == ["first", "second"]
    assert found.regions[-1].outputs == ["y"]


def test_regions_are_in_topological_order():
    found = find_regions(residual_model())
    place = {region: number for number, region in enumerate(found.regions)}
    assert all(place[s] < place[region] for region in found.regions for s in region.sources)


def test_quantizers_belong_to_their_reader():
    b = bw.Builder("quantized")
    x = b.input("x", "f32[2, 4]")
    scale, zero = np.float32(0.1), np.uint8(128)
    q = b.quantize(x, scale, zero, to="u8", name="q")
    w = b.dequantize(np.ones((4, 4), np.int8), np.float32(0.1))
    y = b.matmul(b.dequantize(q, scale, zero), w, name="product")
    found = find_regions(b.build(y=y))
    assert names(found) == [["input"], ["matmul"]]
    assert found.of["q"] is found.of["product"]


def test_an_output_that_is_constant_is_shown():
    b = bw.Builder("fixed")
    b.input("x", "f32[2]")
    found = find_regions(b.build(y=b.constant(np.ones(2, np.float32))))
    assert found.regions[-1].outputs == ["y"]


def test_an_empty_graph_has_an_empty_layout():
    assert layered([]).edges == []


@pytest.mark.parametrize("seed", range(6))
def test_boxes_of_a_rank_do_not_overlap(seed):
    draw = np.random.default_rng(seed)
    sources = [
        sorted({int(s) for s in draw.integers(0, box, draw.integers(0, 4))}) if box else []
        for box in range(40)
    ]
    layout = layered(sources)
    for box, read in enumerate(sources):
        assert all(layout.ranks[source] < layout.ranks[box] for source in read)
    for rank in set(layout.ranks):
        row = sorted(x for x, r in zip(layout.x, layout.ranks, strict=True) if r == rank)
        assert all(b - a > 0.99 for a, b in pairwise(row))
    for edge in layout.edges:
        span = layout.ranks[edge.target] - layout.ranks[edge.source]
        assert len(edge.points) == (span + 1 if span <= LONGEST else 0)


def test_a_chain_with_skips_is_straight():
    sources = [[], *[[k - 1] + ([k - 3] if k % 3 == 0 and k > 2 else []) for k in range(1, 30)]]
    layout = layered(sources)
    assert max(layout.x) - min(layout.x) < 0.5
