"""Small models for tests of training, as graphs and as PyTorch modules with the same weights."""

import numpy as np

import bitwright as bw

SIZES = 12, 16, 5


def mlp(seed=0, batch="batch"):
    """A graph of two layers, with parameters w1, b1, w2, b2 and the output logits."""
    rng = np.random.default_rng(seed)
    inside, hidden, classes = SIZES
    b = bw.Builder("mlp")
    x = b.input("x", f"f32[{batch}, {inside}]")
    w1 = b.parameter("w1", (rng.normal(size=(inside, hidden)) * 0.3).astype(np.float32))
    b1 = b.parameter("b1", (rng.normal(size=hidden) * 0.1).astype(np.float32))
    w2 = b.parameter("w2", (rng.normal(size=(hidden, classes)) * 0.3).astype(np.float32))
    b2 = b.parameter("b2", np.zeros(classes, np.float32))
    h = b.relu(b.add(b.matmul(x, w1), b1))
    return b.build(logits=b.add(b.matmul(h, w2), b2))


def torch_mlp(graph):
    """Parameters by name as torch tensors, and the function of the logits."""
    import torch

    p = {v.name: torch.tensor(v.node.attrs["value"], requires_grad=True) for v in graph.parameters}

    def logits(x):
        return torch.relu(torch.tensor(x) @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]

    return p, logits


def samples(count=64, seed=1):
    """Inputs and labels by name."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, SIZES[0])).astype(np.float32)
    return {"x": x, "labels": rng.integers(0, SIZES[2], count)}


def batches(count=20, size=16, seed=1):
    """A list of batches."""
    found = samples(count * size, seed)
    return [
        {name: array[n * size : (n + 1) * size] for name, array in found.items()}
        for n in range(count)
    ]


def regularized(seed=0):
    """A graph of two layers with batch norm and dropout between them, and the output logits."""
    rng = np.random.default_rng(seed)
    inside, hidden, classes = SIZES
    b = bw.Builder("regularized")
    x = b.input("x", f"f32[batch, {inside}]")
    w1 = b.parameter("w1", (rng.normal(size=(inside, hidden)) * 0.3).astype(np.float32))
    scale = b.parameter("scale", np.ones(hidden, np.float32))
    bias = b.parameter("bias", np.zeros(hidden, np.float32))
    mean = b.parameter("mean", np.zeros(hidden, np.float32), trainable=False)
    var = b.parameter("var", np.ones(hidden, np.float32), trainable=False)
    w2 = b.parameter("w2", (rng.normal(size=(hidden, classes)) * 0.3).astype(np.float32))
    h = b.relu(b.batch_norm(b.matmul(x, w1), scale, bias, mean, var, eps=1e-5))
    h = b.dropout(h, np.asarray(0, np.int64), rate=0.25)
    return b.build(logits=b.matmul(h, w2))


def same_bits(one, other):
    """Whether two trainers have the same states, bit for bit."""
    first, second = one.program.states, other.program.states
    assert first.keys() == second.keys()
    return [n for n in first if first[n].tobytes() != second[n].tobytes()] == []
