"""bw.prepare_qat, bw.convert_qat and bw.QatConfig: widths, starts, results, bad input."""

import numpy as np
import pytest
from qat_models import data_of, mlp, residual

import bitwright as bw
from bitwright import demo
from bitwright.errors import TrainingError
from bitwright.ir.graph import constant_value
from bitwright.quant import PerGroup, PerTensor


@pytest.fixture(scope="module")
def quantized():
    return bw.quantize(residual(), data_of(residual()), "int8-static")


def stored_weights(graph):
    """The quantized constants of rank 2 and more, in order."""
    nodes = [n for n in graph.nodes if n.op == "dequantize" and n.inputs[0].is_constant]
    return [constant_value(n.inputs[0]) for n in nodes if n.inputs[0].rank > 1]


@pytest.mark.parametrize(
    "bits, low, high", [(8, -127, 127), (4, -8, 7), (2, -2, 1), ("ternary", -1, 1)]
)
def test_weights_have_the_width_asked_for(quantized, bits, low, high):
    config = bw.QatConfig(weight_bits=bits, ends_in_8_bits=False)
    graph = bw.convert_qat(bw.prepare_qat(quantized, config)).graph
    for array in stored_weights(graph):
        assert array.dtype == np.int8
        assert low <= array.min() and array.max() <= high
        assert array.max() == high or bits == 8


def test_binary_weights_have_one_magnitude(quantized):
    config = bw.QatConfig(weight_bits="binary", ends_in_8_bits=False)
    prepared = bw.prepare_qat(quantized, config)
    graph = bw.convert_qat(prepared).graph
    for array in stored_weights(graph):
        assert (np.abs(array) == 1).all()
    fake = next(n for n in prepared.graph.nodes if n.op == "fake_binarize")
    w = fake.inputs[0].node.attrs["value"]
    start = fake.inputs[1].node.inputs[0].node.attrs["value"]
    np.testing.assert_allclose(start, np.abs(w).mean(axis=(1, 2, 3)), rtol=1e-6)


def test_first_and_last_layer_keep_8_bits(quantized):
    arrays = stored_weights(bw.convert_qat(bw.prepare_qat(quantized, bw.QatConfig(4))).graph)
    assert [int(np.abs(a).max()) > 8 for a in arrays] == [True, False, False, True]


def test_widths_by_pattern(quantized):
    config = bw.QatConfig(4, ends_in_8_bits=False, layers={"conv_1": 8, "re:conv_2.*": "ternary"})
    arrays = stored_weights(bw.convert_qat(bw.prepare_qat(quantized, config)).graph)
    assert [int(np.abs(a).max()) for a in arrays][2] == 1
    assert np.abs(arrays[1]).max() > 8 >= np.abs(arrays[0]).max()
    with pytest.raises(TrainingError, match="no quantized layer matches 'attic'"):
        bw.prepare_qat(quantized, bw.QatConfig(layers={"attic": 8}))


@pytest.mark.parametrize("granularity", [PerTensor(), PerGroup(7)])
@pytest.mark.parametrize("mode", ["learned", "fixed"])
def test_granularities_train(granularity, mode):
    graph = mlp()
    q = bw.quantize(graph, data_of(graph), "int8-static")
    config = bw.QatConfig(4, weight_granularity=granularity, scale_mode=mode)
    trainer = bw.Trainer(bw.prepare_qat(q, config), teacher=graph, distillation="mse")
    data = data_of(graph, seed=4)
    before = trainer.evaluate(data)["loss"]
    trainer.fit(data, steps=20, progress=False)
    assert trainer.evaluate(data)["loss"] < before
    (feeds,) = data_of(graph, count=1, seed=9)
    found = bw.compile(bw.convert_qat(trainer)).run(feeds)["y"]
    np.testing.assert_allclose(trainer.predict(feeds)["y"], found, atol=2e-2 * np.ptp(found))


def test_models_come_from_files_and_float_graphs(tmp_path, quantized):
    data = data_of(residual())
    (feeds,) = data_of(residual(), count=1, seed=9)
    expected = bw.compile(quantized).run(feeds)["y"]
    names = {v.name for v in bw.prepare_qat(quantized).graph.parameters}
    for suffix in (".onnx", ".bw"):
        path = tmp_path / f"int8{suffix}"
        quantized.save(path)
        prepared = bw.prepare_qat(path)
        assert {v.name for v in prepared.graph.parameters} == names, "u8 weights are trained too"
        found = bw.compile(bw.convert_qat(prepared)).run(feeds)["y"]
        np.testing.assert_array_equal(found, expected)
        found = bw.compile(bw.convert_qat(bw.prepare_qat(quantized.graph))).run(feeds)["y"]
        np.testing.assert_array_equal(found, expected)
    prepared = bw.prepare_qat(residual(), data=data)
    found = bw.compile(bw.convert_qat(prepared)).run(feeds)["y"]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("consumer", ["onnxruntime", "openvino"])
def test_weight_only_products_of_files_are_trained(tmp_path, consumer):
    """MatMulNBits in the file; 40 terms leave a short last block of 32."""
    rng = np.random.default_rng(0)
    b = bw.Builder("two")
    x = b.input("x", "f32[n, 40]")
    for name, shape in (("w1", (40, 24)), ("w2", (24, 8))):
        x = b.matmul(x, b.parameter(name, rng.normal(size=shape).astype(np.float32)))
    data = [{"x": rng.normal(size=(8, 40)).astype(np.float32)} for _ in range(4)]
    bw.quantize(b.build(y=x), data, "w4").save(tmp_path / "w4.onnx", consumer=consumer)
    prepared = bw.prepare_qat(tmp_path / "w4.onnx")
    assert sum(node.op == "fake_quantize" for node in prepared.graph.nodes) == 2
    found = bw.compile(bw.convert_qat(prepared)).run(data[0])["y"]
    expected = bw.compile(tmp_path / "w4.onnx").run(data[0])["y"]
    np.testing.assert_array_equal(found, expected)


def test_training_may_continue_from_a_converted_model(quantized):
    """Lowering the width in steps: 8 -> 4 -> ternary."""
    four = bw.convert_qat(bw.prepare_qat(quantized, bw.QatConfig(4, ends_in_8_bits=False)))
    again = bw.convert_qat(bw.prepare_qat(four))
    (feeds,) = data_of(residual(), count=1, seed=9)
    expected = bw.compile(four).run(feeds)["y"]
    np.testing.assert_array_equal(bw.compile(again).run(feeds)["y"], expected)
    three = bw.convert_qat(bw.prepare_qat(four, bw.QatConfig("ternary")))
    assert all(np.abs(a).max() == 1 for a in stored_weights(three.graph)[1:-1])


@pytest.mark.parametrize("ste", ["identity", "clipped", "tanh", "hard_tanh"])
@pytest.mark.parametrize("mode", ["learned", "fixed", "moving_average", "per_batch"])
def test_every_gradient_and_scale_mode_trains(ste, mode):
    graph = mlp()
    q = bw.quantize(graph, data_of(graph), "int8-static")
    config = bw.QatConfig(2, ste=ste, scale_mode=mode, observer_steps=5)
    trainer = bw.Trainer(bw.prepare_qat(q, config), teacher=graph, distillation="mse")
    data = data_of(graph, seed=4)
    before = trainer.evaluate(data)["loss"]
    trainer.fit(data, steps=30, progress=False)
    assert trainer.evaluate(data)["loss"] < before


def test_learned_scales_do_not_decay(quantized):
    prepared = bw.prepare_qat(quantized, bw.QatConfig(4))
    trainer = bw.Trainer(prepared, teacher=residual(), optimizer=bw.SGD(lr=0.0, weight_decay=0.5))
    assert trainer.settings.decay == {"*.scale_factor": 0.0}
    assert bw.prepare_qat(quantized, bw.QatConfig(scale_mode="fixed")).no_decay == ()


@pytest.mark.parametrize(
    "config, message",
    [
        ({"weight_bits": 3}, "weight_bits is not supported; expected None or 8 or 4"),
        ({"weight_bits": True}, "weight_bits is not supported"),
        ({"activation_bits": 2}, "activation_bits is not supported"),
        ({"scale_mode": "guess"}, "scale_mode is not supported"),
        ({"ste": "relu"}, "ste is not supported"),
        ({"momentum": 0.0}, "momentum is not supported"),
        ({"observer_steps": -1}, "observer_steps is not supported"),
        ({"layers": {"a": 5}}, "weight_bits is not supported"),
        ({"weight_granularity": 3}, "weight_granularity is not supported"),
    ],
)
def test_configs_are_checked(config, message):
    with pytest.raises(TrainingError, match=message):
        bw.QatConfig(**config)


def test_bad_models(quantized):
    with pytest.raises(TrainingError, match="is not quantized, and ranges of activations need"):
        bw.prepare_qat(mlp())
    with pytest.raises(TrainingError, match="a quantized model takes no options; found threads"):
        bw.prepare_qat(quantized, threads=1)
    with pytest.raises(TrainingError, match="this is no QatConfig"):
        bw.prepare_qat(quantized, {"weight_bits": 4})
    with pytest.raises(TrainingError, match="has no fake quantization to convert"):
        bw.convert_qat(mlp())
    with pytest.raises(TrainingError, match="this cannot be converted"):
        bw.convert_qat(3)
    with pytest.raises(TrainingError, match="dynamic ranges have 8 bits"):
        bw.prepare_qat(quantized, bw.QatConfig(activation_bits=4, scale_mode="per_batch"))


@pytest.mark.parametrize(
    "bits, start, end", [(4, 0.97, 0.98), (2, 0.5, 0.96), ("binary", 0.5, 0.96)]
)
def test_training_recovers_the_accuracy_of_the_demo_model(tmp_path, bits, start, end):
    """Distilled from the float model without labels; the file scores the same in ONNX Runtime."""
    ort = pytest.importorskip("onnxruntime")
    teacher = bw.load(demo.model_path())
    q = bw.quantize(teacher, demo.calibration(), "int8-static")
    inputs, labels = demo.held_out()

    def score(logits):
        return float((logits.argmax(axis=1) == labels).mean())

    prepared = bw.prepare_qat(q, bw.QatConfig(weight_bits=bits))
    before = score(bw.compile(bw.convert_qat(prepared)).run(inputs)["logits"])
    assert (before < start) == (bits != 4)
    trainer = bw.Trainer(
        prepared, teacher=teacher, optimizer=bw.Adam(lr=2e-3), schedule=bw.train.cosine(200)
    )
    images = np.concatenate([batch["image"] for batch in demo.calibration()])
    trainer.fit({"image": images}, steps=200, batch_size=32, progress=False)
    deployed = bw.convert_qat(trainer)
    logits = bw.compile(deployed).run(inputs)["logits"]
    assert score(logits) >= end
    assert score(trainer.predict(inputs)["logits"]) == score(logits)
    deployed.save(tmp_path / "model.onnx")
    session = ort.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    assert abs(score(session.run(None, inputs)[0]) - score(logits)) <= 0.002
