"""Known causes of a gap between training and deployment, each excluded by a test."""

import numpy as np
import pytest
from qat_models import data_of, mlp, residual

import bitwright as bw
from bitwright.ir.graph import constant_value
from bitwright.ops.core.interpret import run
from bitwright.passes.manager import run_passes
from bitwright.train.qat.batch_norm import reestimate_batch_norm
from bitwright.train.qat.model import QatModel
from bitwright.train.qat.observers import PREFIX


def trained(graph, steps=6, **config):
    q = bw.quantize(graph, data_of(graph), "int8-static")
    prepared = bw.prepare_qat(q, bw.QatConfig(**config))
    trainer = bw.Trainer(prepared, teacher=graph, distillation="mse", optimizer=bw.Adam(lr=3e-3))
    if steps:
        trainer.fit(data_of(graph, seed=4), steps=steps, progress=False)
    return trainer


def observers(trainer):
    return {n: a.copy() for n, a in trainer.program.states.items() if n.startswith(PREFIX)}


def test_scales_keep_their_type_and_bits(tmp_path):
    trainer = trained(mlp(), weight_bits=4)
    deployed = bw.convert_qat(trainer)
    weights = trainer.parameters()
    (feeds,) = data_of(mlp(), batch=7, count=1, seed=9)
    for node in deployed.graph.nodes:
        if node.op in ("quantize", "dequantize"):
            assert node.inputs[1].dtype.name == "f32"
    for name in ("matmul.weight", "matmul_1.weight"):
        starts = trainer.graph().value(f"{name}.scale_start").node.attrs["value"]
        expected = starts * np.maximum(weights[f"{name}.scale_factor"], np.float32(2**-10))
        found = [
            constant_value(node.inputs[1])
            for node in deployed.graph.nodes
            if node.op == "dequantize" and constant_value(node.inputs[0]) is not None
        ]
        assert any(np.array_equal(expected, scale) for scale in found)
    expected = trainer.predict(feeds)["y"]
    for suffix in (".onnx", ".bw"):
        deployed.save(tmp_path / f"model{suffix}")
        found = bw.compile(tmp_path / f"model{suffix}").run(feeds)["y"]
        np.testing.assert_array_equal(found, expected)


def pair_and_fake(x, scale, zero, low=0, high=255):
    """Fake quantization and its deployed pair in a graph each, with a scale that is a state."""
    b = bw.Builder("fake")
    s = b.state("s", np.float32(scale))
    z = b.constant(np.uint8(zero))
    graph = b.build(y=b.fake_quantize(b.input("x", "f32[n]"), s, z, low=low, high=high))
    prepared = QatModel(graph, bw.QatConfig())
    expanded = run_passes(graph, prepared.passes)
    return run(graph, {"x": x})["y"], bw.compile(expanded).run({"x": x})["y"]


def test_rounding_precedes_the_zero_point():
    """rne(x / s) + z differs from rne(x / s + z) at ties if z is odd."""
    x = (np.arange(-6, 6, dtype=np.float32) + np.float32(0.5)) * np.float32(0.25)
    fake, deployed = pair_and_fake(x, 0.25, 101)
    expected = np.rint(x / np.float32(0.25)) * np.float32(0.25)
    np.testing.assert_array_equal(fake, expected)
    np.testing.assert_array_equal(deployed, expected)
    other = (np.rint(x / np.float32(0.25) + 101) - 101) * np.float32(0.25)
    assert (other != expected).any()


def test_values_are_divided_by_the_scale():
    """x / s and x * (1 / s) round to different integers for some x."""
    scale = np.float32(0.0171)
    ties = (np.arange(250, dtype=np.float32) + np.float32(0.5)) * scale
    x = np.concatenate([np.nextafter(ties, up) for up in (np.float32(0), np.float32(9))] + [ties])
    by_product = np.rint(x * (np.float32(1) / scale))
    by_division = np.rint(x / scale)
    assert (by_product != by_division).any()
    fake, deployed = pair_and_fake(x, scale, 0)
    expected = np.clip(by_division, 0, 255).astype(np.float32) * scale
    np.testing.assert_array_equal(fake, expected)
    np.testing.assert_array_equal(deployed, expected)


@pytest.mark.parametrize("mode", ["learned", "per_batch", "moving_average"])
def test_zero_channels_have_the_same_floor(mode):
    """A channel of zeros has no range: training and deployment use the same small scale."""
    graph = mlp()
    weights = {v.name: v.node.attrs["value"].copy() for v in graph.parameters}
    weights["w1"][:, :5] = 0
    graph = bw.load_parameters(graph, weights)
    trainer = trained(graph, weight_bits=4, scale_mode=mode, ends_in_8_bits=False)
    (feeds,) = data_of(graph, batch=7, count=1, seed=9)
    deployed = bw.compile(bw.convert_qat(trainer)).run(feeds)["y"]
    assert np.isfinite(deployed).all()
    np.testing.assert_array_equal(trainer.predict(feeds)["y"], deployed)


def with_batch_norm():
    b = bw.Builder("normed")
    rng = np.random.default_rng(0)
    x = b.input("x", "f32[batch, 3, 8, 8]")
    for i, given in enumerate((3, 8)):
        w = b.parameter(f"w{i}", rng.normal(0, 0.3, (8, given, 3, 3)).astype(np.float32))
        x = b.conv(x, w, pads=(1, 1, 1, 1))
        names = ("scale", "bias", "mean", "var")
        arrays = [rng.uniform(0.5, 1.5, 8).astype(np.float32) for _ in names]
        pairs = zip(names, arrays, strict=True)
        x = b.relu(b.batch_norm(x, *(b.parameter(f"{n}{i}", a) for n, a in pairs), eps=1e-3))
    return b.build(y=x)


def test_batch_norm_is_folded_before_training():
    """There is one moment of folding, so training and deployment have the same weights."""
    graph = with_batch_norm()
    trainer = trained(graph)
    step = trainer.program.last_graph
    assert not any(node.op.startswith("batch_norm") for node in step.nodes)
    (feeds,) = data_of(graph, batch=7, count=1, seed=9)
    deployed = bw.compile(bw.convert_qat(trainer)).run(feeds)["y"]
    np.testing.assert_array_equal(trainer.predict(feeds)["y"], deployed)


def test_statistics_are_estimated_anew_before_folding():
    graph = with_batch_norm()
    data = data_of(graph, count=3)
    found = reestimate_batch_norm(graph, data)
    whole = np.concatenate([batch["x"] for batch in data])
    conv = next(node for node in graph.nodes if node.op == "conv").outputs[0]
    seen = run(graph.with_(outputs=(("conv", conv),)), {"x": whole})["conv"]
    values = {v.name: v.node.attrs["value"] for v in found.parameters}
    np.testing.assert_allclose(values["mean0"], seen.mean(axis=(0, 2, 3)), atol=1e-5)
    np.testing.assert_allclose(values["var0"], seen.var(axis=(0, 2, 3)), rtol=1e-4)
    config = bw.QatConfig(reestimate_batch_norm=True)
    prepared = bw.prepare_qat(graph, config, data)
    exact = bw.compile(found).run(data[0])["y"]
    close = bw.compile(bw.convert_qat(prepared)).run(data[0])["y"]
    assert np.abs(close - exact).max() < 0.05 * np.abs(exact).max()


def test_observers_stop_moving():
    graph = residual()
    trainer = trained(graph, steps=3, scale_mode="moving_average", observer_steps=3)
    seen = observers(trainer)
    assert seen[f"{PREFIX}step"] == 3
    start = trainer.prepared.graph
    moved = [n for n, a in seen.items() if (a != start.value(n).node.attrs["value"]).any()]
    assert any(name.endswith(".scale") for name in moved)
    trainer.fit(data_of(graph, seed=8), steps=3, progress=False)
    trainer.evaluate(data_of(graph, seed=5))
    after = observers(trainer)
    for name, array in seen.items():
        if name != f"{PREFIX}step":
            np.testing.assert_array_equal(after[name], array, err_msg=name)


def test_conversion_while_observers_move_takes_their_present_state():
    graph = residual()
    trainer = trained(graph, steps=3, scale_mode="moving_average", observer_steps=100)
    (feeds,) = data_of(graph, batch=7, count=1, seed=9)
    deployed = bw.compile(bw.convert_qat(trainer)).run(feeds)["y"]
    np.testing.assert_array_equal(trainer.predict(feeds)["y"], deployed)
