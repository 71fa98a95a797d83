"""Train what you run: a training step, an evaluation and the deployed model compute the same bits.

Every case trains a few steps first, so that weights, biases, scales and observers have moved.
"""

from functools import cache

import numpy as np
import pytest
from qat_models import MODELS, Weights, data_of

import bitwright as bw
from bitwright.pipeline import compile_step

INTEGER_CHAINS = ("conv_chain", "residual", "depthwise", "mlp")
WIDTHS = (8, 4, 2, "ternary", "binary")
MODES = ("learned", "fixed", "moving_average", "per_batch")


@cache
def quantized(model, recipe="int8-static"):
    graph = MODELS[model]()
    return graph, bw.quantize(graph, data_of(graph), recipe)


def trained(model, steps=5, recipe="int8-static", **config):
    graph, q = quantized(model, recipe)
    prepared = bw.prepare_qat(q, bw.QatConfig(**config))
    trainer = bw.Trainer(
        prepared, teacher=graph, distillation="mse", optimizer=bw.Adam(lr=3e-3), threads=1
    )
    if steps:
        trainer.fit(data_of(graph, seed=4), steps=steps, progress=False)
    return graph, prepared, trainer


def step_outputs(trainer, feeds):
    """The outputs of the model inside a training step."""
    graph = trainer.program.last_graph
    names = {name: value.name for name, value in trainer.program.simple.outputs}
    seen = graph.with_(outputs=tuple((n, graph.value(v)) for n, v in names.items()))
    exe = compile_step(seen, threads=1)
    exe.engine.states = {name: array.copy() for name, array in trainer.program.states.items()}
    given = dict(trainer.teacher.add_targets(feeds))
    given["train.lr"] = np.float32(0)
    return exe.run({name: given[name] for name in exe.input_names})


def require_equal(model, **config):
    graph, _, trainer = trained(model, **config)
    deployed = bw.compile(bw.convert_qat(trainer))
    for feeds in data_of(graph, batch=5, count=2, seed=9):
        expected = deployed.run(feeds)["y"]
        np.testing.assert_array_equal(trainer.predict(feeds)["y"], expected)
        np.testing.assert_array_equal(step_outputs(trainer, feeds)["y"], expected)


@pytest.mark.parametrize("model", INTEGER_CHAINS)
def test_training_equals_deployment(model):
    require_equal(model)


@pytest.mark.parametrize("bits", WIDTHS[1:])
@pytest.mark.parametrize("model", ["residual", "mlp"])
def test_training_equals_deployment_at_narrow_widths(model, bits):
    require_equal(model, weight_bits=bits, ends_in_8_bits=False)


@pytest.mark.parametrize("mode", MODES[1:])
def test_training_equals_deployment_in_every_scale_mode(mode):
    require_equal("residual", weight_bits=4, scale_mode=mode, observer_steps=3)


def test_training_equals_deployment_with_4_bit_activations():
    require_equal("residual", weight_bits=4, activation_bits=4)


def test_training_equals_deployment_per_tensor():
    from bitwright.quant import PerTensor

    require_equal("mlp", weight_bits=4, weight_granularity=PerTensor())


@pytest.mark.parametrize("recipe", ["int8-static", "int8-dynamic"])
def test_transformer_differs_by_less_than_a_quantization_step(recipe):
    graph, _, trainer = trained("transformer", recipe=recipe)
    deployed = bw.compile(bw.convert_qat(trainer))
    (feeds,) = data_of(graph, batch=5, count=1, seed=9)
    expected = deployed.run(feeds)["y"]
    scale = np.ptp(expected) / 255
    assert np.abs(trainer.predict(feeds)["y"] - expected).max() <= scale
    assert np.abs(step_outputs(trainer, feeds)["y"] - expected).max() <= scale


@pytest.mark.parametrize("model", MODELS)
def test_int8_starts_at_the_post_training_result(model):
    graph, q = quantized(model)
    (feeds,) = data_of(graph, batch=5, count=1, seed=9)
    expected = bw.compile(q).run(feeds)["y"]
    prepared = bw.prepare_qat(q)
    np.testing.assert_array_equal(bw.compile(bw.convert_qat(prepared)).run(feeds)["y"], expected)


def test_clips_below_zero_round_in_the_same_order():
    """Saturation implies the limits of the clip, and a constant scale stands in front of it."""

    def clipped():
        b = bw.Builder("clipped")
        w = Weights(b)
        x = b.input("x", "f32[batch, 12]")
        low, high = np.float32(-1), np.float32(1)
        h = b.clip(b.tanh(b.matmul(x, w("w1", 12, 16))), low, high)
        h = b.mul(b.tanh(b.matmul(h, w("w2", 16, 16))), np.float32(0.7))
        return b.build(y=b.matmul(b.clip(h, low, high), w("w3", 16, 8)))

    graph, adam = clipped(), bw.Adam(lr=3e-3)
    prepared = bw.prepare_qat(bw.quantize(graph, data_of(graph), "int8-static"))
    trainer = bw.Trainer(prepared, teacher=graph, distillation="mse", optimizer=adam, threads=1)
    trainer.fit(data_of(graph, seed=4), steps=5, progress=False)
    (feeds,) = data_of(graph, batch=20000, count=1, seed=9)
    deployed = bw.compile(bw.convert_qat(trainer), threads=1).run(feeds)["y"]
    np.testing.assert_array_equal(trainer.predict(feeds)["y"], deployed)
