"""Matmuls with constant weights in the form that quantization expects; shared constants."""

import numpy as np
import pytest

import bitwright as bw
from bitwright.ir.naming import origin
from bitwright.ops.core.interpret import run
from bitwright.passes.manager import run_passes
from bitwright.passes.simplify.expose_weights import expose_weights
from bitwright.passes.simplify.share_constants import MIN_ELEMENTS, share_constants
from bitwright.pipeline import INFERENCE


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def ops(graph):
    return [node.op for node in graph.nodes if not node.is_boundary]


@pytest.mark.parametrize(
    "equation, x, w",
    [
        ("btd,edf->ebtf", (2, 3, 4), (5, 4, 6)),
        ("ebtd,edf->ebtf", (5, 2, 3, 4), (5, 4, 6)),
        ("ntd,dhk->nhtk", (2, 3, 4), (4, 5, 6)),
        ("ij,jk->ki", (2, 3), (3, 4)),
        ("bij,bjk->bik", (2, 3, 4), (2, 4, 5)),
    ],
)
@pytest.mark.parametrize("is_first", [False, True])
def test_an_einsum_with_a_weight_is_one_product_with_a_constant(equation, x, w, is_first):
    b = bw.Builder("einsum")
    operands = [b.input("x", f"f32{list(x)}"), b.parameter("layer.weight", draw(*w))]
    left, right = equation.split("->")
    if is_first:
        operands, left = operands[::-1], ",".join(left.split(",")[::-1])
    graph = b.build(y=b.einsum(*operands, equation=f"{left}->{right}", name="layer"))
    made = run_passes(graph, (*INFERENCE, expose_weights))
    (product,) = (node for node in made.nodes if node.op == "matmul")
    assert "einsum" not in ops(made)
    assert product.inputs[1].is_constant and origin(product.inputs[1]) == "layer.weight"
    feeds = {"x": draw(*x, seed=1)}
    np.testing.assert_allclose(run(made, feeds)["y"], run(graph, feeds)["y"], atol=1e-5)


def test_a_large_weight_is_laid_out_too(monkeypatch):
    """The limit of constant folding does not apply to the weight of a product."""
    monkeypatch.setenv("BITWRIGHT_FOLD_LIMIT", "8")
    b = bw.Builder("einsum")
    w = b.parameter("w", draw(3, 5, 7))
    y = b.einsum(b.input("x", "f32[n, 5]"), w, equation="nd,edf->nef")
    made = run_passes(b.build(y=y), (*INFERENCE, expose_weights))
    (product,) = (node for node in made.nodes if node.op == "matmul")
    assert product.inputs[1].is_constant and product.inputs[1].shape == (5, 21)


def test_einsums_of_values_stay():
    b = bw.Builder("einsum")
    x = b.input("x", "f32[n, 5]")
    graph = b.build(y=b.einsum(x, x, equation="id,jd->ij"))
    assert ops(run_passes(graph, (*INFERENCE, expose_weights))) == ["einsum"]


def test_a_single_matrix_loses_its_batch_axes():
    b = bw.Builder("one")
    graph = b.build(y=b.matmul(b.input("x", "f32[n, 4]"), draw(1, 1, 4, 3)))
    made = run_passes(graph, (*INFERENCE, expose_weights))
    assert ops(made) == ["matmul", "reshape"]
    feeds = {"x": draw(2, 4)}
    np.testing.assert_allclose(run(made, feeds)["y"], run(graph, feeds)["y"], rtol=1e-6)


def constants(graph):
    return [node for node in graph.nodes if node.op == "constant"]


def test_equal_constants_become_one():
    b = bw.Builder("twice")
    x, w = b.input("x", "f32[n, 32]"), draw(32, 64)
    y = b.matmul(b.matmul(x, w), b.constant(np.ascontiguousarray(w.T)))
    graph = b.build(y=b.matmul(y, w.copy()), z=b.matmul(x, draw(32, 64, seed=1)))
    made = run_passes(graph, (share_constants,))
    assert len(constants(made)) == 2 and ops(made).count("transpose") == 1
    feeds = {"x": draw(3, 32)}
    for name, value in run(graph, feeds).items():
        np.testing.assert_array_equal(run(made, feeds)[name], value)


def test_embedding_tables_keep_their_layout_and_outputs_stay_constants():
    b = bw.Builder("tied")
    x, ids, table = b.input("x", "f32[n, 32]"), b.input("ids", "i64[n]"), draw(64, 32)
    head = b.matmul(x, np.ascontiguousarray(table.T), name="head")
    kept = b.constant(table.copy(), name="kept")
    graph = b.build(y=head, rows=b.gather(b.constant(table), ids, axis=0), kept=kept)
    made = run_passes(graph, (share_constants,))
    (lookup,) = (node for node in made.nodes if node.op == "gather")
    assert lookup.inputs[0].is_constant
    assert dict(made.outputs)["kept"].is_constant and len(constants(made)) == 2


def test_small_constants_and_those_of_another_type_are_left_alone():
    b = bw.Builder("small")
    x, w = b.input("x", "f32[n, 8]"), draw(8, 8)
    assert w.size < MIN_ELEMENTS
    graph = b.build(y=b.matmul(b.matmul(x, w), w.copy()))
    assert run_passes(graph, (share_constants,)) is graph
