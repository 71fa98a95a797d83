"""Every rule of the lowering passes fires on some case and keeps reference results.

These rules match ops with any operands, so a case is a graph instead of the rule's own pattern
(`test_rules`). The rules are those that a pass hands to `rewrite`.
"""

import ml_dtypes
import numpy as np
import pytest

from bitwright.ops.core.builder import Builder
from bitwright.ops.core.check import verify
from bitwright.ops.core.interpret import run
from bitwright.ops.core.registry import get
from bitwright.passes.lower_integer import lower_f8, lower_integer, lower_weights
from bitwright.passes.simplify import expand_composites
from bitwright.report.feeds import random_inputs
from bitwright.rewrite import Trace

rng = np.random.default_rng(0)
SCALE = np.float32(0.03)
NEAR = 1.01 * float(SCALE)
"""Results may differ by one step of the last quantization."""
RNNS = {"rnn": 1, "gru": 3, "lstm": 4}


def normal(*shape):
    return rng.normal(size=shape).astype(np.float32)


def through(b, x, scale=SCALE, zero=100):
    """dequantize(quantize(x))"""
    point = np.uint8(zero)
    return b.dequantize(b.quantize(x, scale, point, to="u8"), scale, point)


def weight(b, *shape, axis=None):
    q = rng.integers(-127, 128, shape).astype(np.int8)
    scale = rng.uniform(0.001, 0.003, () if axis is None else shape[axis]).astype(np.float32)
    return b.dequantize(b.constant(q), b.constant(scale), axis=axis)


def moved(op, **attrs):
    """A movement op between quantized values."""

    def graph(b):
        x = through(b, b.input("x", "f32[2, 3, 4, 6]"))
        operands = [b.constant(np.array([2, 0]))] if op == "gather" else []
        results = b.op(op, x, *operands, **attrs)
        return list(results) if isinstance(results, tuple) else results

    return graph


def matmul_layer(b):
    x = through(b, b.input("x", "f32[n, 16]"))
    y = b.add(b.matmul(x, weight(b, 16, 8, axis=1)), b.constant(normal(8)))
    return through(b, b.relu(y))


def conv(b):
    x = through(b, b.input("x", "f32[n, 3, 7, 7]"))
    return b.conv(x, weight(b, 4, 3, 3, 3, axis=0), b.constant(normal(4)))


def concat(b):
    x, y = (through(b, b.input(name, "f32[n, 4]")) for name in "xy")
    return through(b, b.concat(x, y, axis=1))


def pad(b):
    x = through(b, b.input("x", "f32[2, 4]"))
    return b.pad(x, b.constant(np.float32(0)), pads=[0, 1, 0, 2])


def resize(b):
    x = through(b, b.input("x", "f32[1, 2, 4, 4]"))
    return b.resize(x, sizes=(1, 2, 8, 8), mode="nearest")


def quantized_before_transpose(b):
    x = through(b, b.input("x", "f32[n, 16]"))
    y = b.reshape(b.matmul(x, weight(b, 16, 8)), shape=(x.shape[0], 4, 2))
    return through(b, b.transpose(y, perm=(2, 0, 1)))


def table(b):
    return through(b, b.sigmoid(through(b, b.input("x", "f32[n, 9]"))), np.float32(1 / 255), 0)


def mean(b):
    x = through(b, b.input("x", "f32[2, 3, 8, 8]"))
    return b.reduce_mean(x, axes=(2, 3), keepdims=False)


def average_pool(b):
    x = through(b, b.input("x", "f32[2, 3, 8, 8]"))
    return through(b, b.avg_pool(x, kernel=(2, 2), strides=(2, 2)))


def recurrent(op):
    def graph(b):
        rows = RNNS[op] * 5
        x = through(b, b.input("x", "f32[4, 3, 6]"))
        w, r = (weight(b, 1, rows, size, axis=1) for size in (6, 5))
        return list(b.op(op, x, w, r, hidden=5))

    return graph


def experts(b):
    q, scale, zero = b.dynamic_quantize(b.input("x", "f32[6, 8]"), to="u8", per_token=True)
    x = b.dequantize(q, scale, zero, axis=1, block=8)
    w = rng.integers(-127, 128, (3, 8, 4)).astype(np.int8)
    scales = rng.uniform(0.001, 0.003, (3, 1, 4)).astype(np.float32)
    return b.grouped_matmul(x, b.dequantize(w, scales, axis=1, block=8), np.array([2, 1, 3]))


def blocks(b, *shape):
    """A weight [.., K, N] with a scale for each block of 4 along K."""
    q = b.constant(rng.integers(-8, 8, shape).astype(np.int8))
    count = (*shape[:-2], shape[-2] // 4, shape[-1])
    scale = rng.uniform(0.01, 0.03, count).astype(np.float32)
    return b.dequantize(q, b.constant(scale), axis=len(shape) - 2, block=4)


def block_matmul(b):
    return b.add(b.matmul(b.input("x", "f32[n, 8]"), blocks(b, 8, 5)), b.constant(normal(5)))


INTEGER = {
    "matmul": (matmul_layer, NEAR),
    "conv": (conv, 1e-4),
    "concat": (concat, NEAR),
    "transpose": (moved("transpose", perm=(3, 1, 0, 2)), 0),
    "reshape": (moved("reshape", shape=(6, 24)), 0),
    "slice": (moved("slice", starts=[1], stops=[3], steps=[1], axes=[1]), 0),
    "gather": (moved("gather", axis=1), 0),
    "max_pool": (moved("max_pool", kernel=(2, 2)), 0),
    "split": (moved("split", axis=3, sizes=[2, 4]), 0),
    "expand": (moved("expand", shape=(5, 2, 3, 4, 6)), 0),
    "tile": (moved("tile", repeats=[1, 2, 1, 1]), 0),
    "roll": (moved("roll", shifts=[1], axes=[2]), 0),
    "pad": (pad, 0),
    "resize": (resize, 0),
    "quantized_before_transpose": (quantized_before_transpose, NEAR),
    "table": (table, 1e-6),
    "mean": (mean, 1e-5),
    "average_pool": (average_pool, NEAR),
    "experts": (experts, 1e-5),
    **{op: (recurrent(op), 0.02) for op in RNNS},
}


def recurrent_f16(op):
    def graph(b):
        rows = RNNS[op] * 5
        w, r = (b.constant(normal(1, rows, size).astype(np.float16)) for size in (6, 5))
        return list(b.op(op, b.input("x", "f16[4, 3, 6]"), w, r, hidden=5))

    return graph


def batch_norm_of_training(b):
    x, dy = b.input("x", "f32[n, 3, 4, 2]"), b.input("dy", "f32[n, 3, 4, 2]")
    scale = b.input("scale", "f32[3]")
    y, mean, var = b.batch_norm_train(x, scale, b.input("bias", "f32[3]"))
    return [y, mean, var, *b.batch_norm_backward(dy, x, scale, mean, var)]


def sample_f16(op):
    """The first sample of an op, in f16."""

    def graph(b):
        arrays = get(op).samples()[0].inputs
        values = [b.constant(x.astype(np.float16)) for x in arrays[1:]]
        return list(b.op(op, b.input("x", f"f16{list(arrays[0].shape)}"), *values))

    return graph


IN_TRAINING = ("gru_train", "lstm_train", "rnn_backward", "gru_backward", "lstm_backward")


def f8_operands(b):
    x, scale, _ = b.dynamic_quantize(b.input("x", "f32[n, 8]"), to="f8e4m3fn", per_token=True)
    return x, scale, b.constant(normal(8, 5).astype(ml_dtypes.float8_e4m3fn))


def f8_product(b):
    x, _, w = f8_operands(b)
    return b.f8_matmul(x, w)


def f8_matmul(b):
    x, scale, w = f8_operands(b)
    weight = b.dequantize(w, rng.uniform(0.1, 1, 5).astype(np.float32), axis=1)
    return b.matmul(b.dequantize(x, scale, axis=1, block=8), weight)


COMPOSITES = {
    **{f"{op} in f16": (sample_f16(op), 5e-3) for op in IN_TRAINING},
    **{f"{op} in f16": (recurrent_f16(op), 2e-3) for op in RNNS},
    "einsum": (
        lambda b: b.einsum(
            b.input("x", "f32[3, 4]"), b.input("y", "f32[4, 5]"), equation="ij,jk->ik"
        ),
        1e-5,
    ),
    "narrow cast": (lambda b: b.cast(b.input("x", "f32[n]"), to="i4"), 0),
    "batch norm of training": (batch_norm_of_training, 1e-4),
    "quantize and dequantize": (lambda b: through(b, b.input("x", "f32[n, 3]")), 0),
    "product of float8": (f8_product, 1e-5),
    "dynamic quantize, stored signed": (
        lambda b: list(
            b.dynamic_quantize(b.input("x", "f32[n, 3]"), to="u8", per_token=True, stored="i8")
        ),
        1e-6,
    ),
    "dynamic quantize": (lambda b: list(b.dynamic_quantize(b.input("x", "f32[n, 3]"))), 1e-6),
}


def dequant_matmul(element="f32", constant=True, bias=False):
    def graph(b):
        q = b.constant(rng.integers(-8, 8, (5, 8)).astype(np.int8))
        if not constant:
            q = b.cast(b.input("q", "f32[5, 8]"), to="i8")
        kind = {"f32": np.float32, "f16": np.float16}[element]
        rest = [None, b.constant(normal(5).astype(kind))] if bias else []
        scale = b.constant(np.full((5, 2), 0.02, kind))
        return b.dequant_matmul(b.input("x", f"{element}[n, 8]"), q, scale, *rest, block=4)

    return graph


WEIGHTS = {
    "blocks": (block_matmul, 1e-4),
    "batched": (lambda b: b.matmul(b.input("x", "f32[2, n, 8]"), blocks(b, 2, 8, 5)), 1e-4),
    "experts": (
        lambda b: b.grouped_matmul(
            b.input("x", "f32[6, 8]"), blocks(b, 3, 8, 5), np.array([2, 1, 3])
        ),
        1e-4,
    ),
    "in f16": (dequant_matmul("f16"), 5e-3),
    "of the run": (dequant_matmul(constant=False), 1e-4),
    "with a bias": (dequant_matmul(bias=True), 1e-4),
}
PASSES = {
    "lower_integer": (lower_integer, INTEGER),
    "expand_composites": (expand_composites, COMPOSITES),
    "lower_weights": (lower_weights, WEIGHTS),
    "lower_f8": (lower_f8, {"f8 rows and columns": (f8_matmul, 1e-5)}),
}


def lowered(name, make):
    """The graph of a case, the graph after the pass, and the rules that fired."""
    module, _ = PASSES[name]
    b = Builder("case")
    results = make(b)
    graph = verify(b.build(*(results if isinstance(results, list) else [results])))
    trace = Trace()
    found = verify(getattr(module, name)(graph, trace))
    return graph, found, {event.rule for event in trace.events if event.fired}


@pytest.mark.parametrize(
    "name, case", [(name, case) for name in PASSES for case in PASSES[name][1]]
)
def test_results_stay(name, case):
    make, tolerance = PASSES[name][1][case]
    graph, found, fired = lowered(name, make)
    assert fired, "no rule fired"
    feeds = random_inputs(graph, {"n": 5}, 0)
    before, after = run(graph, feeds), run(found, feeds)
    for one, other in zip(before.values(), after.values(), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        wide = one.astype(np.float64)
        bound = tolerance * max(1.0, np.abs(wide).max(initial=0))
        assert np.abs(wide - other.astype(np.float64)).max(initial=0) <= bound


@pytest.mark.parametrize("name", PASSES)
def test_every_rule_fires(name, monkeypatch):
    module, cases = PASSES[name]
    rules, rewrite = set(), module.rewrite

    def spy(graph, given, trace, *rest):
        rules.update(rule.name for rule in given)
        return rewrite(graph, given, trace, *rest)

    monkeypatch.setattr(module, "rewrite", spy)
    fired = set().union(*(lowered(name, make)[2] for make, _ in cases.values()))
    assert rules and rules - fired == set()
