"""Small graphs for calibration: a convolution, a perceptron, an if, a loop, a state."""

import numpy as np

import bitwright as bw
from bitwright.quant.calibration.run import is_held_out


def perceptron(element="f32"):
    rng = np.random.default_rng(0)
    b = bw.Builder("perceptron")
    x = b.input("x", f"{element}[n, 8]")
    weights = [rng.normal(size=(8, 8)).astype(bw.dtype(element).numpy) for _ in range(2)]
    h = b.gelu(b.matmul(x, b.parameter("w1", weights[0]), name="m"), name="h")
    t = b.transpose(h, perm=[1, 0], name="t")
    y = b.matmul(h, b.parameter("w2", weights[1]), name="y")
    return b.build(y, t)


def convolution():
    rng = np.random.default_rng(0)
    b = bw.Builder("convolution")
    x = b.input("x", "f32[n, 3, 9, 9]")
    w = b.parameter("w", rng.normal(size=(4, 3, 3, 3)).astype(np.float32))
    norm = [b.parameter(f"p{i}", rng.uniform(1, 2, 4).astype(np.float32)) for i in range(4)]
    c = b.conv(x, w, pads=[1, 1, 1, 1], name="c")
    return b.build(b.relu(b.batch_norm(c, *norm, name="bn"), name="y"))


def branches():
    """if flag: relu(2x) else: -x; then one is added."""
    bodies = {}
    for name in ("then", "else"):
        inner = bw.Builder(name)
        x = inner.input("x", "f32[n]")
        last = inner.relu(inner.mul(x, 2.0, name="twice"), name="r")
        bodies[name] = inner.build(last if name == "then" else inner.neg(x, name="minus"))
    b = bw.Builder("branches")
    flag, x = b.input("flag", "bool[]"), b.input("x", "f32[n]")
    return b.build(b.add(b.if_(flag, x, name="choice", **bodies), 1.0, name="y"))


def counter():
    b = bw.Builder("counter")
    total = b.state("total", np.zeros(2, np.float32))
    after = b.add(total, b.input("x", "f32[2]"), name="after")
    b.update(total, after)
    return b.build(b.neg(after, name="y"))


def batches(count, rows=(3, 5, 1), seed=0, element="f32"):
    """Inputs of a perceptron, of varying size."""
    rng = np.random.default_rng(seed)
    return [
        {"x": rng.normal(size=(rows[i % len(rows)], 8)).astype(bw.dtype(element).numpy)}
        for i in range(count)
    ]


def all_learned(data):
    """Data with copies where batches are held out, so that every given one is learned from."""
    found = []
    for batch in data:
        if is_held_out(len(found) + 1):
            found.append(batch)
        found.append(batch)
    return found


class Interrupted:
    """Data that is interrupted before a batch, once."""

    def __init__(self, data, at, sends):
        self.data, self.at, self.sends = data, at, sends

    def __len__(self):
        return len(self.data)

    def __iter__(self):
        for i, item in enumerate(self.data):
            if i == self.at:
                self.at = None
                self.sends()
            yield item


def raises():
    raise KeyboardInterrupt
