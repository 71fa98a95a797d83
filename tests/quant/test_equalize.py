"""Cross-layer equalization: channels of very different ranges between products."""

import numpy as np
import pytest
from small_models import all_learned

import bitwright as bw
from bitwright.quant.calibration.run import CalibrationRun
from bitwright.quant.data.batches import Batches
from bitwright.quant.model.assign import assign
from bitwright.quant.model.points import find_points
from bitwright.quant.model.recipe import recipe
from bitwright.quant.model.rewrite import apply_choices
from bitwright.quant.model.transforms.equalize import find_chain, fold_factors, relate_channels
from bitwright.quant.model.weights.weights import WeightFormat, quantize_weights

CHANNELS = 24


def network(spread=0.0, between=lambda b, y: b.relu(y), also_output=False):
    """Convolutions, a depthwise one and products; `spread` decades between sizes of channels."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: (rng.normal(size=shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)
    sizes = [(10 ** rng.uniform(-spread / 2, spread / 2, CHANNELS)).astype("f4") for _ in range(4)]
    wide = [size[:, None, None, None] for size in sizes]
    b = bw.Builder("chain")
    x = b.input("x", "f32[n, 3, 10, 10]")
    same = {"pads": (1, 1, 1, 1)}
    y = b.conv(x, draw(CHANNELS, 3, 3, 3) * wide[0], draw(CHANNELS) * sizes[0], **same, name="a")
    y = between(b, y)
    inner = b.conv(
        y, draw(CHANNELS, 1, 3, 3) / wide[0] * wide[1], draw(CHANNELS) * sizes[1],
        groups=CHANNELS, **same, name="deep",
    )  # fmt: skip
    y = b.max_pool(b.leaky_relu(inner, alpha=0.1), kernel=(2, 2), strides=(2, 2))
    w = draw(CHANNELS, CHANNELS, 1, 1) / sizes[1][None, :, None, None] * wide[2]
    y = b.relu(b.conv(y, w, draw(CHANNELS) * sizes[2], name="point"))
    y = b.reduce_mean(y, axes=[2, 3], keepdims=False)
    w = draw(CHANNELS, CHANNELS) / sizes[2][:, None] * sizes[3]
    y = b.relu(b.add(b.matmul(y, w, name="up"), draw(CHANNELS) * sizes[3]))
    y = b.matmul(y, draw(CHANNELS, 8) / sizes[3][:, None], name="down")
    outputs = {"y": y, "inner": inner} if also_output else {"y": y}
    return b.build(**outputs)


def batches(count=8, seed=1):
    rng = np.random.default_rng(seed)
    return [{"x": rng.normal(size=(4, 3, 10, 10)).astype(np.float32)} for _ in range(count)]


def sqnr(exact, found):
    return 10 * np.log10((exact**2).sum() / ((exact - found) ** 2).sum())


def quality(graph, **options):
    made = bw.quantize(graph, all_learned(batches()), recipe={"base": "int8-static", **options})
    data = batches(4, seed=2)
    run = lambda model: np.concatenate([bw.compile(model).run(batch)["y"] for batch in data])
    return sqnr(run(graph), run(made)), made


def test_channels_of_any_range_quantize_as_well_as_equal_ones():
    even, _ = quality(network())
    found, made = quality(network(spread=5))
    without, _ = quality(network(spread=5), equalize=False)
    assert even > 25
    assert found > even - 3
    assert without < found - 6
    assert not any(node.op == "mul" for node in made.graph.nodes)


def test_clip_keeps_its_bound():
    _, made = quality(network(spread=3, between=lambda b, y: b.clip(y, 0.0, 0.4)))
    assert {"a", "point.equalized"} <= {node.name for node in made.graph.nodes}


def test_values_with_other_readers_are_not_scaled():
    graph = network(spread=3, also_output=True)
    _, made = quality(graph)
    assert "deep" in {node.name for node in made.graph.nodes}
    (batch,) = batches(1)
    exact, found = (bw.compile(model).run(batch)["inner"] for model in (graph, made))
    assert sqnr(exact, found) > 20


@pytest.mark.parametrize("scheme", ["int8-static", "int8-dynamic"])
def test_folding_changes_no_result(scheme):
    graph = network(spread=2)
    rules = recipe(scheme)
    calibration = CalibrationRun(graph, find_points(graph), Batches(batches(4), graph), None, None)
    calibration.run(progress=False)
    relate_channels(calibration.points)
    choices = assign(calibration.points, calibration.stats, rules)
    weights = {}
    for choice in choices:
        stats = calibration.stats[choice.point.name]
        weights |= quantize_weights(stats, choice.activation, WeightFormat())
    folded = fold_factors(graph, choices, weights)
    assert folded.names and all(name.endswith(".equalized") for name in folded.names.values())
    (batch,) = batches(1, seed=3)
    results = []
    for equalize in (False, True):
        made = apply_choices(graph, choices, weights, [], equalize=equalize)
        behind = [n for n in made.nodes if n.op == "mul" and n.inputs[0].name != "x"]
        assert bool(behind) is not equalize
        results.append(bw.compile(made, target="reference").run(batch)["y"])
    assert sqnr(*results) > 50  # a code that lay between two may fall to the other side


def test_chains_follow_the_channel_axis():
    rng = np.random.default_rng(0)
    b = bw.Builder()
    x = b.input("x", "f32[n, 4, 6, 5]")
    y = b.conv(x, rng.normal(size=(7, 4, 1, 1)).astype(np.float32), name="conv")
    transposed = b.transpose(b.relu(y), perm=(0, 2, 3, 1))
    mean = b.reduce_mean(transposed, axes=[1], keepdims=False)
    graph = b.build(mean=mean, softmax=b.softmax(transposed, axis=-1))
    values = graph.values
    assert find_chain(values[mean.name], 2).product.name == "conv"
    assert find_chain(values[mean.name], 1) is None  # columns of the image
    assert find_chain(graph.results[1], 3) is None


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("read_twice", [False, True])
def test_factors_fold_into_the_preceding_norm(op, read_twice):
    """Only if the norm has no other reader."""
    rng = np.random.default_rng(3)
    b = bw.Builder("block")
    x = b.input("x", "f32[n, 64]")
    scale = rng.normal(size=64) * 10 ** rng.uniform(-1.5, 0.5, 64)
    rest = (rng.normal(size=64).astype(np.float32),) if op == "layer_norm" else ()
    normed = getattr(b, op)(x, scale.astype(np.float32), *rest, axis=-1, eps=1e-5)
    y = b.matmul(normed, rng.normal(size=(64, 64)).astype(np.float32))
    graph = b.build(y=b.add(y, normed) if read_twice else y)
    data = [{"x": rng.normal(size=(40, 64)).astype(np.float32)} for _ in range(4)]
    found = bw.quantize(graph, data).graph
    (qvalues,) = [node for node in found.nodes if node.op == "dynamic_quantize"]
    assert qvalues.inputs[0].node.op == ("mul" if read_twice else op)
    exact, close = (bw.compile(g).run(data[0])["y"] for g in (graph, found))
    assert sqnr(exact, close) > 30


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_a_norm_without_a_scale_takes_no_factors(op):
    rng = np.random.default_rng(0)
    b = bw.Builder("norm")
    sizes = 10 ** rng.uniform(-1.5, 0.5, 64)
    normed = getattr(b, op)(b.input("x", "f32[n, 64]"))
    graph = b.build(y=b.matmul(normed, rng.normal(size=(64, 64)).astype(np.float32)))
    data = [{"x": (rng.normal(size=(40, 64)) * sizes).astype(np.float32)} for _ in range(4)]
    quantized = bw.quantize(graph, data, recipe="int8-dynamic").graph
    found = next(node for node in quantized.nodes if node.op == op)
    assert [value.name for value in found.operands] == ["x"]
    exact, close = (bw.compile(g).run(data[0])["y"] for g in (graph, quantized))
    assert sqnr(exact, close) > 30
