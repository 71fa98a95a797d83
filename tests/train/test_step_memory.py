"""Memory of training steps: what passes and lazy zeros save, with the same bits."""

import numpy as np
import pytest
from training_models import batches, mlp, same_bits

import bitwright as bw
from bitwright.backends.cpu.backend import CpuBackend
from bitwright.backends.cpu.passes import CPU


def conv_net():
    """Three convolutions with batch norm and relu, a residual and a linear layer."""
    rng = np.random.default_rng(0)
    b = bw.Builder("conv_net")
    x = b.input("x", "f32[batch, 3, 10, 10]")

    def weight(name, *shape):
        return b.parameter(name, (rng.normal(size=shape) * 0.2).astype(np.float32))

    def layer(x, number, inside, outside):
        x = b.conv(x, weight(f"w{number}", outside, inside, 3, 3), pads=(1, 1, 1, 1))
        ones, zeros = np.ones(outside, np.float32), np.zeros(outside, np.float32)
        given = [b.parameter(f"{name}{number}", array) for name, array in
                 (("scale", ones), ("bias", zeros))]  # fmt: skip
        given += [b.parameter(f"{name}{number}", array, trainable=False) for name, array in
                  (("mean", zeros), ("var", ones))]  # fmt: skip
        return b.batch_norm(x, *given, eps=1e-5)

    first = b.relu(layer(x, 1, 3, 8))
    second = b.relu(layer(first, 2, 8, 8))
    third = b.relu(b.add(layer(second, 3, 8, 8), first))
    pooled = b.reduce_mean(third, axes=(2, 3), keepdims=False)
    return b.build(logits=b.matmul(pooled, weight("out", 8, 5)))


def images(count=4, size=8):
    rng = np.random.default_rng(1)
    return [
        {
            "x": rng.normal(size=(size, 3, 10, 10)).astype(np.float32),
            "labels": rng.integers(0, 5, size),
        }
        for _ in range(count)
    ]


def trained(graph, data, **options):
    options = {"loss": "cross_entropy", "optimizer": bw.AdamW(lr=0.01), "threads": 1, **options}
    trainer = bw.Trainer(graph, **options)
    history = trainer.fit(data, epochs=1)
    return trainer, history.losses


def arena(trainer):
    return trainer.program._last.engine._plans.arena.nbytes


@pytest.mark.parametrize(
    "make, data, options",
    [
        (conv_net, images(), {}),
        (conv_net, images(), {"precision": "bf16"}),
        (mlp, batches(4), {"ema": 0.9, "accumulate": 2}),
        (mlp, batches(4), {"clip": 1.0, "optimizer": bw.SGD(0.1, 0.9, nesterov=True)}),
    ],
)
def test_steps_have_the_same_bits_as_without_the_passes(monkeypatch, make, data, options):
    saving, losses = trained(make(), data, **options)
    monkeypatch.setattr(CpuBackend, "step_passes", CPU)
    plain, plain_losses = trained(make(), data, **options)
    assert losses == plain_losses
    assert same_bits(saving, plain)
    assert arena(saving) <= arena(plain)


def test_batch_norm_keeps_one_value_besides_its_result(monkeypatch):
    saving, _ = trained(conv_net(), images())
    monkeypatch.setattr(CpuBackend, "step_passes", CPU)
    plain, _ = trained(conv_net(), images())
    kept = 8 * 8 * 100 * 4  # x - mean of a layer
    assert arena(plain) - arena(saving) > kept


def test_gradients_are_not_held_until_all_are_known():
    """The arena is smaller than the gradients of all layers together."""
    layers, width = 6, 128
    b = bw.Builder("deep")
    h = b.input("x", f"f32[batch, {width}]")
    for number in range(layers):
        h = b.relu(b.matmul(h, b.parameter(f"w{number}", np.eye(width, dtype=np.float32))))
    rng = np.random.default_rng(0)
    data = [{"x": rng.normal(size=(8, width)).astype(np.float32), "labels": np.arange(8)}]
    trainer, _ = trained(b.build(logits=h), data * 2)
    assert arena(trainer) < (layers / 2) * width * width * 4


def test_moments_and_sums_start_without_arrays_of_zeros():
    trainer, _ = trained(mlp(), batches(2), accumulate=2)
    made = [v for v in trainer.program.last_graph.states if v.name.startswith("train.")]
    large = [v.name for v in made if v.node.attrs.get("value") is not None and v.rank]
    assert large == []
