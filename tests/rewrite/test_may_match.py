"""Looking at the makers of operands first refuses no match that the whole pattern would find."""

import numpy as np
import pytest

from bitwright.ir.graph import Graph, Value
from bitwright.ops.core.builder import Builder
from bitwright.passes.simplify.canonicalize import RULES
from bitwright.passes.simplify.recognize_composites import RULES as COMPOSITES
from bitwright.rewrite import Rule
from bitwright.rewrite.match import _match_op, match_node, may_match

PAIRS = ("add", "sub", "mul", "div", "maximum", "minimum", "pow")
SINGLES = ("neg", "relu", "exp", "sqrt", "reciprocal", "identity", "tanh", "erf", "abs")
ORDERS = [
    Rule("both", lambda op, x, y: op.add(op.neg(x), op.mul(y, 1)), lambda op, x, y: x),
    Rule("number", lambda op, x: op.mul(0.5, op.exp(x)), lambda op, x: x),
    Rule("twice", lambda op, x: op.add(op.neg(x), op.neg(x)), lambda op, x: x),
    Rule("maybe", lambda op, x, h: op.clip(op.neg(x), 0, op.maybe(h)), lambda op, x, h: x),
]


def random_graph(seed: int) -> Graph:
    random = np.random.default_rng(seed)
    b = Builder(f"random{seed}")
    made: list[Value] = [b.input("x", "f32[2, 3]"), b.input("y", "f32[2, 3]")]

    def operand() -> Value:
        if random.random() < 0.3:
            return b.constant(np.float32(random.choice([0, 1, 2, 0.5, -1])))
        return made[random.integers(len(made))]

    for _ in range(60):
        kind = random.random()
        if kind < 0.5:
            made.append(b.op(str(random.choice(PAIRS)), operand(), operand()))
        elif kind < 0.8:
            made.append(b.op(str(random.choice(SINGLES)), made[random.integers(len(made))]))
        elif kind < 0.9:
            made.append(b.clip(made[-1], operand(), None if random.random() < 0.5 else operand()))
        elif made[-1].rank == 2:
            made.append(b.transpose(b.reshape(made[-1], shape=(3, 2)), perm=(1, 0)))
    return b.build(*made[-1:])


@pytest.mark.parametrize("seed", range(5))
def test_every_match_passes_the_look_at_makers(seed):
    fits = 0
    for rule in [*RULES, *COMPOSITES, *ORDERS]:
        for node in random_graph(seed).nodes:
            full = [list(found) for found in _match_op(rule.pattern, node, {})]
            assert [list(found) for found in match_node(rule.pattern, node)] == full, rule.name
            fits += bool(full)
            assert may_match(rule.pattern, node) or not full
    assert fits > 20
