"""Every rewrite rule fires on a graph made from its own pattern and keeps reference results.

A case says what stands for the pattern's variables: a type (an input), an array (a constant) or an
attribute's value; `attrs` gives attributes that the pattern leaves open, by op.
"""

from fnmatch import fnmatchcase

import numpy as np
import pytest

from bitwright.autodiff.grad import grad
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.check import verify
from bitwright.ops.core.interpret import run
from bitwright.passes.simplify import canonicalize, fold_batch_norm, recognize_composites
from bitwright.report.feeds import random_inputs
from bitwright.rewrite import Rule, Trace, rewrite
from bitwright.rewrite.pattern import Literal, Variable

RULES = {r.name: r for m in (canonicalize, fold_batch_norm, recognize_composites) for r in m.RULES}
rng = np.random.default_rng(0)


def normal(*shape):
    return rng.normal(size=shape).astype(np.float32)


def triangle(size):
    return np.triu(np.full((size, size), -1e9, np.float32), 1)


ROPE = {"x": "f32[2, 3, 5, 8]"}
TABLES = {"cos": np.tile(normal(5, 4), 2), "sin": np.tile(normal(5, 4), 2)}
QKV = {"q": "f32[2, 3, 5, 8]", "v": "f32[2, 3, 7, 6]", "s": np.float32(0.3)}
BN = {k: np.abs(normal(4)) + 0.1 for k in ("scale", "bias", "mean", "var")}
CONV = {"x": "f32[n, 2, 5]", "w": normal(4, 2, 3)}
SQUARE = dict.fromkeys("qkv", "f32[2, 3, 5, 8]")
FLAT = {"q": "f32[6, n, 8]", "k": "f32[6, 8, n]", "v": "f32[6, n, 4]", "s": np.float32(0.3)}
KEYS = {"k": "f32[2, 3, 8, 7]"}
PER_QUERY = {"axes": (-1,), "keepdims": True}
NO_BYTES = {"p": None, "q": None, "b": np.arange(4, dtype=np.int32)}
CASES = [
    ("add-zero", {"x": "f32[n, 3]"}, {}),
    ("mul-one", {"x": "f32[n, 3]"}, {}),
    ("div-one", {"x": "f32[n, 3]"}, {}),
    ("pow-one", {"x": "f32[n, 3]"}, {}),
    ("sub-zero", {"x": "i64[n, 3]"}, {}),
    ("square*", {"x": "f32[n, 3]"}, {}),
    ("not-of-not", {"x": "bool[4]"}, {}),
    ("*-of-neg", {"x": "f32[n]"}, {}),
    ("abs-of-abs", {"x": "f32[n]"}, {}),
    ("relu-*", {"x": "f32[n, 3]"}, {}),
    ("*-neg-as-*", {"x": "f32[n, 3]", "y": "f32[3]"}, {}),
    ("reciprocal-of-sqrt", {"x": "f32[n]"}, {}),
    ("one-over-sqrt", {"x": "f32[n]"}, {}),
    ("divide-by-power-of-two", {"x": "f32[n, 2]", "c": np.array([0.5, 4], "f4")}, {}),
    ("merge-*", {"x": "f32[n, 3]", "a": normal(3), "b": normal(1)}, {}),
    ("identity", {"x": "f32[n]"}, {}),
    ("cast-to-own-type", {"x": "f32[n]"}, {"cast": {"to": "f32"}}),
    ("cast-of-cast", {"x": "f16[n]", "t": "i64"}, {"cast": {"to": "f32"}}),
    ("transpose-to-own-order", {"x": "f32[n, 2]", "p": (0, 1)}, {}),
    ("transpose-of-transpose", {"x": "f32[n, 2, 5]", "p": (2, 0, 1), "q": (1, 0, 2)}, {}),
    ("transpose-as-reshape", {"x": "f32[n, 1, 5]"}, {"transpose": {"perm": (1, 0, 2)}}),
    ("reshape-to-own-shape", {"x": "f32[3, 2]"}, {"reshape": {"shape": (3, 2)}}),
    ("reshape-of-reshape", {"x": "f32[6, 4]"}, {"reshape": {"shape": (3, 8)}}),
    ("expand-to-own-shape", {"x": "f32[3, 2]"}, {"expand": {"shape": (3, 2)}}),
    (
        "slice-of-everything",
        {"x": "f32[3, 2]"},
        {"slice": {"starts": [0], "stops": [3], "steps": [1], "axes": [0]}},
    ),
    ("pad-by-nothing", {"x": "f32[3]", "v": None}, {"pad": {"pads": [0, 0]}}),
    ("tile-once", {"x": "f32[3]"}, {"tile": {"repeats": [1]}}),
    ("concat-of-one", {"x": "f32[3]"}, {"concat": {"axis": 0}}),
    ("gather-of-range-*", {"x": "f32[n, 5]", "i": np.array([0, 2, -1]), "a": 1}, {}),
    ("gather-of-range-*", {"x": "f32[5, n]", "i": np.array([3]), "a": -2}, {}),
    ("gather-of-range-*", {"x": "f32[5, n]", "i": np.array([2, 1, 0], np.int32), "a": 0}, {}),
    ("sum-of-neighbouring-*", {"x": "f32[n, 3]", "y": "f32[n, 2]", "u": None, "v": None}, {}),
    ("split-into-one", {"x": "f32[3]"}, {"split": {"axis": 0, "sizes": [3]}}),
    ("where-*", {"c": "bool[3]", "x": "f32[3]", "y": "f32[3]"}, {}),
    ("positions-are-not-negative", {"x": np.arange(5)}, {}),
    ("and-true", {"x": "bool[n, 3]", "y": np.array(True)}, {}),
    ("and-true", {"x": np.array([[True]]), "y": "bool[3]"}, {}),
    (
        "choice-before-expand",
        {"c": "bool[1, 3]", "x": np.float32(0), "y": np.float32(-9)},
        {"expand": {"shape": (4, 3)}},
    ),
    (
        "attention-broadcasts-its-mask",
        {**SQUARE, "mask": "f32[2, 1, 1, 5]"},
        {"attention": {"scale": 0.5}, "expand": {"shape": (2, 1, 5, 5)}},
    ),
    ("batch-norm-as-scale-and-shift", {"x": "f32[n, 4, 3]", **BN}, {}),
    ("*-into-conv", {**CONV, "b": normal(4), "c": normal(4, 1)}, {}),
    ("*-into-conv", {**CONV, "b": None, "c": normal(1)}, {}),
    (
        "*-into-transposed-conv",
        {"x": "f32[n, 2, 5]", "w": normal(2, 4, 3), "b": normal(4), "c": normal(4, 1)},
        {},
    ),
    ("factor-into-matmul", {"x": "f32[n, 2]", "w": normal(2, 4), "c": normal(4)}, {}),
    ("product-of-empty", {"x": "f32[n, 2, 0]", "w": normal(0, 4)}, {}),
    ("product-of-empty", {"x": "f32[n, 3]", "w": normal(3, 0)}, {}),
    ("product-of-empty", {"x": "f32[n, 0]", "w": normal(0)}, {}),
    ("product-of-empty", {"x": "f32[0]", "w": normal(0, 4)}, {}),
    (
        "integer-product-of-empty",
        {**NO_BYTES, "x": "u8[n, 0]", "w": np.zeros((0, 4), np.int8)},
        {},
    ),
    ("convolution-of-empty", {"x": "f32[n, 0, 5]", "w": normal(4, 0, 3), "b": normal(4)}, {}),
    ("convolution-of-empty", {"x": "f32[0, 2, 5]", "w": normal(4, 2, 3), "b": None}, {}),
    (
        "transposed-convolution-of-empty",
        {"x": "f32[n, 0, h]", "w": normal(0, 4, 3), "b": normal(4)},
        {},
    ),
    (
        "integer-convolution-of-empty",
        {**NO_BYTES, "x": "u8[n, 0, 5]", "w": np.zeros((4, 0, 3), np.int8)},
        {},
    ),
    ("gelu-*", {"x": "f32[n, 3]"}, {}),
    ("s*lu*", {"x": "f32[n, 3]"}, {}),
    ("quick-gelu*", {"x": "f32[n, 3]", "a": np.float32(1.7)}, {}),
    ("sigmoid-*", {"x": "f32[n]"}, {}),
    ("softplus-*", {"x": "f32[n]"}, {}),
    ("mish", {"x": "f32[n]"}, {}),
    ("hard-*", {"x": "f32[n, 3]", "a": 1 / 6, "b": 0.5}, {}),
    ("softmax-from-exp", {"x": "f32[n, 3]", "a": (1,)}, {}),
    ("log-softmax-*", {"x": "f32[n, 3]", "a": 1}, {}),
    ("*-norm-from-*", {"x": "f32[n, 3, 4]", "e": np.float32(1e-5), "a": (1, 2)}, {}),
    ("scale-into-*-norm", {"x": "f32[n, 3, 4]", "g": "f32[4]"}, {}),
    ("bias-into-*-norm", {"x": "f32[n, 3, 4]", "g": "f32[4]", "c": "f32[4]"}, {}),
    ("rotary-from-sliced-halves", {**ROPE, **TABLES}, {}),
    ("rotary-from-split-halves", {**ROPE, **TABLES}, {"split": {"axis": 3, "sizes": [4, 4]}}),
    (
        "rotary-from-rotated-halves",
        {"x": ROPE["x"], "cos": normal(5, 4), "sin": normal(5, 4)},
        {"split": {"axis": 3, "sizes": [4, 4]}, "concat": {"axis": 3}},
    ),
    (
        "rotary-from-pairs",
        {"y": "f32[2, 5, 3, 4, 2]", "c": normal(5, 1, 4), "s": normal(5, 1, 4)},
        {"gather": {"axis": 4}},
    ),
    ("attention-*-added-*", {**QKV, **KEYS, "mask": "f32[5, 7]"}, {"reduce_max": PER_QUERY}),
    ("attention-*-added-*", {**FLAT, "mask": "f32[n, n]"}, {"reduce_max": PER_QUERY}),
    ("attention-*-selected-*", {**QKV, **KEYS, "mask": np.eye(5, 7, dtype=bool)}, {}),
    ("attention-*-unmasked-*", {**QKV, **KEYS}, {}),
    ("causal-mask-as-attribute", {**SQUARE, "mask": triangle(5)}, {"attention": {"scale": 0.3}}),
    (
        "scale-of-*-into-attention",
        {**QKV, "k": "f32[2, 3, 7, 8]", "mask": None},
        {"attention": {"scale": 0.5}},
    ),
]


class Instance:
    """Builds the graph that a rule's pattern describes."""

    def __init__(self, case, attrs):
        self.builder, self.case, self.attrs = Builder("case"), case, attrs
        self.made, self.seen = {}, 0

    def value(self, pattern, position=0, op=""):
        b = self.builder
        if isinstance(pattern, Literal):
            if (op, position) == ("where", 0):
                return np.array(bool(pattern.number))
            return np.array(int(pattern.number)) if op == "gather" else pattern.number
        if isinstance(pattern, Variable):
            if pattern.name not in self.made:
                stands = self.case[pattern.name]
                made = b.input(pattern.name, stands) if isinstance(stands, str) else stands
                if isinstance(stands, (np.ndarray, np.generic)):
                    made = b.constant(stands, name=pattern.name)
                self.made[pattern.name] = made
            return self.made[pattern.name]
        key = _structure(pattern)
        if key not in self.made:
            operands = [self.value(p, i, pattern.op) for i, p in enumerate(pattern.operands)]
            attrs = self._open(pattern, operands) | self.attrs.get(pattern.op, {})
            attrs |= {k: self._attr(v) for k, v in pattern.attrs.items()}
            self.made[key] = b.node(pattern.op, operands, attrs, [])
        return self.made[key].outputs[pattern.index]

    def _attr(self, value):
        return self.case[value.name] if isinstance(value, Variable) else value

    def _open(self, pattern, operands):
        """Attributes of the rotary patterns that depend on the place in the pattern."""
        if pattern.op == "slice" and pattern.bound in ("high", "low"):
            size = operands[0].shape[-1]
            start, stop = (size // 2, size) if pattern.bound == "high" else (0, size // 2)
            return {"starts": [start], "stops": [stop], "steps": [1], "axes": [3]}
        if pattern.op == "pad" and pattern.bound in ("p", "q"):
            return {"pads": (0, 1, 0, 4) if pattern.bound == "p" else (0, 4, 0, 2)}
        if pattern.op == "concat":
            return {"axis": operands[0].rank - 1}
        if pattern.op == "reshape" and operands[0].rank == 4:
            return {"shape": (*operands[0].shape, 1)}
        if pattern.op == "reshape" and operands[0].rank == 5:
            return {"shape": (*operands[0].shape[:3], operands[0].shape[3] * 2)}
        return {}


def _structure(pattern):
    return repr(pattern.__class__(pattern.op, pattern.operands, pattern.attrs, pattern.bound, 0))


def instances():
    for glob, case, attrs in CASES:
        for name, rule in RULES.items():
            if fnmatchcase(name, glob):
                yield pytest.param(rule, case, attrs, id=name)


def test_every_rule_has_a_case():
    covered = {p.values[0].name for p in instances()}
    own = {"grouped-heads", "concat-of-concat"}
    assert set(RULES) - covered == own, "these have tests of their own below"


@pytest.mark.parametrize("rule, case, attrs", list(instances()))
def test_rule_keeps_reference_results(rule: Rule, case, attrs):
    instance = Instance(case, attrs)
    root = instance.value(rule.pattern).node
    graph = verify(instance.builder.build(*root.outputs))
    trace = Trace()
    rewritten = verify(rewrite(graph, [rule], trace))
    assert any(event.fired for event in trace.events), list(map(str, trace.events))
    for seed, size in ((0, 3), (1, 1), (2, 6)):
        feeds = random_inputs(graph, {"n": size}, seed)
        before, after = run(graph, feeds), run(rewritten, feeds)
        for one, other in zip(before.values(), after.values(), strict=True):
            assert one.dtype == other.dtype and one.shape == other.shape
            np.testing.assert_allclose(other, one, rtol=2e-5, atol=2e-6)


def test_sums_of_pads_become_one_concat():
    b = Builder("slices")
    x = b.input("x", "f32[3, n]")
    parts = [b.gather(x, np.array(i)) for i in range(3)]
    total = b.add(b.mul(parts[0], parts[1]), b.exp(parts[2]))
    loss = b.reduce_sum(total, axes=[0], keepdims=False)
    graph = grad(b.build(loss=loss), "loss", wrt=["x"])
    rewritten = verify(canonicalize.canonicalize(graph, Trace()))
    ops = [node.op for node in rewritten.nodes]
    assert ops.count("concat") == 1 and not {"pad", "gather_backward"} & set(ops)
    feeds = random_inputs(graph, {"n": 5}, 0)
    for name, one in run(graph, feeds).items():
        np.testing.assert_allclose(run(rewritten, feeds)[name], one, rtol=1e-6)


def test_indices_that_are_no_range_stay_a_gather():
    for x, indices in (("f32[5]", [0, 1, 3]), ("f32[5]", [1, 1]), ("f32[5]", [4, 5])):
        b = Builder("rows")
        graph = b.build(b.gather(b.input("x", x), np.array(indices)))
        assert canonicalize.canonicalize(graph, Trace()).nodes[-1].op == "gather"


@pytest.mark.parametrize("transposed", [False, True])
def test_a_mask_of_earlier_keys_is_causal(transposed):
    b = Builder("causal")
    q, k, v = (b.input(n, "f32[2, 3, t, 4]") for n in "qkv")
    t = q.shape[2]
    key = b.iota(length=t)
    query = b.reshape(key, shape=(1, 1, t, 1))
    seen = b.ge(query, key) if transposed else b.le(key, query)
    mask = b.where(seen, np.float32(0), np.float32(-np.inf))
    graph = b.build(b.attention(q, k, v, mask, scale=0.5))
    rewritten = verify(rewrite(graph, [RULES["causal-mask-as-attribute"]], Trace()))
    (node,) = (n for n in rewritten.nodes if n.op == "attention")
    assert node.attrs["causal"] and len(node.inputs) == 3
    feeds = random_inputs(graph, {"t": 5}, 0)
    (one,), (other,) = run(graph, feeds).values(), run(rewritten, feeds).values()
    np.testing.assert_allclose(other, one, rtol=1e-6)


def test_a_single_head_without_an_axis_is_not_grouped():
    """Its transpose is a reshape, which merges with the reshape that repeats it."""
    b = Builder("one")
    q, k, v = (b.input(n, f"f32[2, {h}t, 4]") for n, h in (("q", "3, "), ("k", ""), ("v", "")))
    t = q.shape[2]

    def repeat(x):
        wide = b.expand(b.reshape(x, shape=(2, 1, 1, t, 4)), shape=(2, 1, 3, t, 4))
        return b.reshape(wide, shape=(2, 3, t, 4))

    graph = b.build(b.attention(q, repeat(k), repeat(v), scale=0.5))
    trace = Trace()
    assert rewrite(graph, [RULES["grouped-heads"]], trace) is graph
    assert "not repeated heads" in str(trace.events[0])


def test_grouped_heads():
    b = Builder("grouped")
    q, k, v = (b.input(n, f"f32[2, {h}, t, 4]") for n, h in (("q", 6), ("k", 2), ("v", 2)))
    t = q.shape[2]

    def repeat(x):
        wide = b.expand(b.reshape(x, shape=(2, 2, 1, t, 4)), shape=(2, 2, 3, t, 4))
        return b.reshape(wide, shape=(2, 6, t, 4))

    graph = b.build(b.attention(q, repeat(k), repeat(v), scale=0.5))
    rewritten = verify(rewrite(graph, [RULES["grouped-heads"]], Trace()))
    assert [n.op for n in rewritten.nodes if not n.is_boundary] == ["attention"]
    feeds = random_inputs(graph, {"t": 5}, 0)
    (one,), (other,) = run(graph, feeds).values(), run(rewritten, feeds).values()
    np.testing.assert_allclose(other, one, rtol=1e-6)
