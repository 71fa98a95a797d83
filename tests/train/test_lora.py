"""Adapters: gradients against PyTorch, float and quantized weights, merging, files, errors."""

import numpy as np
import pytest
from training_models import SIZES, batches, mlp, samples

import bitwright as bw
from bitwright.errors import TrainingError
from bitwright.frontend.parameters import parameters
from bitwright.ops.core.interpret import run

RECIPES = ("w8", "w4", "int8-static", "int8-dynamic")
RANKS = {"*": 4, "w2": 3}


def fit(graph, steps=30, **options):
    options = {"loss": "cross_entropy", "optimizer": bw.Adam(lr=0.02), "threads": 1, **options}
    trainer = bw.Trainer(graph, **options)
    return trainer, trainer.fit(batches(4), steps=steps)


def logits(model, x):
    return bw.compile(model, threads=1).run({"x": x})["logits"]


def assert_close(found, expected, recipe):
    """Equal up to f32 rounding, and with quantized activations up to one step of a few of them."""
    step = 0.1 if recipe.startswith("int8") else 0
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 + step)
    assert np.abs(found - expected).mean() < 0.005


def trained(graph, seed=3, size=0.3):
    """The graph with random values in place of the zeros of its adapters."""
    rng = np.random.default_rng(seed)
    new = {
        name: (rng.normal(size=array.shape) * size).astype(array.dtype)
        for name, array in parameters(graph).items()
        if name.endswith((".lora_a", ".lora_b"))
    }
    return bw.load_parameters(graph, new, strict=False)


def with_loss(graph):
    """The graph with a random projection of the logits as its loss."""
    b = bw.Builder.of(graph)
    draw = b.input("draw", f"f32[batch, {SIZES[2]}]")
    b.outputs["loss"] = b.reduce_sum(b.mul(b.outputs["logits"], draw), axes=[0, 1], keepdims=False)
    return b.build()


def feeds(count=16):
    draw = np.random.default_rng(5).normal(size=(count, SIZES[2])).astype(np.float32)
    return {"x": samples(count)["x"], "draw": draw}


@pytest.fixture(scope="module")
def quantized():
    """Models of `bw.quantize` by recipe."""
    x = samples(64)["x"]
    data = [{"x": x[at : at + 16]} for at in range(0, 64, 16)]
    return {recipe: bw.quantize(mlp(), data, recipe, progress=False) for recipe in RECIPES}


def small_cnn():
    """Convolutions (strided, dilated, one with groups), batch norm, and a matmul."""
    rng = np.random.default_rng(0)
    b = bw.Builder("cnn")

    def weight(name, *shape):
        return b.parameter(name, (rng.normal(size=shape) * 0.3).astype(np.float32))

    x = b.input("x", "f32[batch, 3, 9, 8]")
    x = b.conv(x, weight("stem", 6, 3, 3, 3), pads=(1, 1, 1, 1), strides=(2, 1))
    mean = b.parameter("norm.mean", np.zeros(6, np.float32), trainable=False)
    var = b.parameter("norm.var", np.ones(6, np.float32), trainable=False)
    x = b.batch_norm(x, weight("norm.scale", 6), weight("norm.bias", 6), mean, var, eps=1e-5)
    x = b.relu(b.conv(x, weight("grouped", 6, 2, 3, 3), groups=3))
    x = b.conv(x, weight("last", 4, 6, 2, 2), weight("last.bias", 4), dilations=(1, 2))
    x = b.reduce_mean(x, axes=[2, 3], keepdims=False)
    return b.build(logits=b.matmul(x, weight("head", 4, 3)))


# what an adapter computes


def test_outputs_are_unchanged_at_first():
    x = samples(17)["x"]
    adapted = bw.add_lora(mlp(), rank=RANKS)
    np.testing.assert_array_equal(run(adapted, {"x": x})["logits"], run(mlp(), {"x": x})["logits"])
    np.testing.assert_allclose(logits(adapted, x), logits(mlp(), x), rtol=1e-6, atol=1e-6)
    arrays = parameters(adapted)
    assert arrays["w1.lora_a"].shape == (SIZES[0], 4) and arrays["w2.lora_b"].shape == (3, SIZES[2])
    assert arrays["w1.lora_a"].any() and not arrays["w1.lora_b"].any()
    is_trainable = {v.name: v.node.attrs["trainable"] for v in adapted.parameters}
    assert {name for name, yes in is_trainable.items() if yes} == {n for n in arrays if "lora" in n}


def test_start_values_depend_on_the_seed_and_the_name_of_the_layer_only():
    one = parameters(bw.add_lora(mlp(), rank=4, layers="w1"))
    both = parameters(bw.add_lora(mlp(), rank=RANKS))
    other = parameters(bw.add_lora(mlp(), rank=4, layers="w1", seed=1))
    assert "w2.lora_a" not in one
    np.testing.assert_array_equal(one["w1.lora_a"], both["w1.lora_a"])
    assert not np.array_equal(one["w1.lora_a"], other["w1.lora_a"])


def test_gradients_equal_those_of_pytorch():
    torch = pytest.importorskip("torch")
    adapted = trained(bw.add_lora(mlp(), rank=RANKS, alpha=6))
    given = feeds()
    found = bw.compile(bw.grad(with_loss(adapted), loss="loss"), threads=1).run(given)
    p = {
        name: torch.tensor(array, requires_grad=".lora" in name)
        for name, array in parameters(adapted).items()
    }

    def layer(x, n, scale):
        update = x @ p[f"w{n}.lora_a"] @ p[f"w{n}.lora_b"]
        return x @ p[f"w{n}"] + p[f"b{n}"] + scale * update

    y = layer(torch.relu(layer(torch.tensor(given["x"]), 1, 6 / 4)), 2, 6 / 3)
    np.testing.assert_allclose(found["logits"], y.detach().numpy(), rtol=1e-4, atol=1e-5)
    (y * torch.tensor(given["draw"])).sum().backward()
    names = {name.removeprefix("grad.") for name in found if name.startswith("grad.")}
    assert names == {name for name in p if ".lora" in name}
    for name in names:
        expected = p[name].grad.numpy()
        np.testing.assert_allclose(found[f"grad.{name}"], expected, rtol=1e-4, atol=1e-4)


def test_training_changes_only_the_adapters():
    adapted = bw.add_lora(mlp(), rank=RANKS)
    trainer, history = fit(adapted)
    assert history.losses[-1] < 0.8 * history.losses[0]
    assert all(".lora_" in name for name in trainer.parameters())
    for name, array in parameters(mlp()).items():
        assert parameters(trainer.graph())[name].tobytes() == array.tobytes()


def test_further_parameters_are_trained_if_asked():
    adapted = bw.add_lora(mlp(), rank=4, layers="w1", train=["w2", "b*"])
    trainer, _ = fit(adapted, steps=2)
    assert trainer.parameters().keys() == {"w1.lora_a", "w1.lora_b", "w2", "b1", "b2"}
    merged = bw.merge_lora(trainer).graph
    assert all(v.node.attrs["trainable"] for v in merged.parameters)


# quantized weights


@pytest.mark.parametrize("recipe", RECIPES)
def test_quantized_weights_stay_and_their_adapters_train(recipe, quantized):
    model, x = quantized[recipe], samples(17)["x"]
    adapted = bw.add_lora(model, rank=RANKS)
    assert [v.name for v in adapted.parameters] == [
        f"{layer}.lora_{side}" for layer in ("w1", "w2") for side in "ab"
    ]
    assert_close(logits(adapted, x), logits(model, x), recipe)
    trainer, history = fit(adapted)
    assert history.losses[-1] < 0.8 * history.losses[0]
    after = {v.name: v.node.attrs["value"] for v in trainer.graph().constants}
    for value in model.graph.constants:
        assert after[value.name].tobytes() == value.node.attrs["value"].tobytes()
    assert_close(logits(trainer.graph(), x), trainer.predict({"x": x})["logits"], recipe)
    assert bw.to_text(bw.remove_lora(trainer)) == bw.to_text(model.graph)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_float_weights_of_a_quantized_model_can_be_merged(recipe, quantized):
    model, x = quantized[recipe], samples(17)["x"]
    adapted = trained(bw.add_lora(model, rank=RANKS), size=0.1)
    with pytest.raises(TrainingError, match=r"layer 'w1' has a quantized weight \(i[48]\)"):
        bw.merge_lora(adapted)
    merged = bw.merge_lora(adapted, dequantize=True)
    assert not merged.graph.parameters
    weights = [v for v in merged.graph.constants if v.name in ("w1.weight", "w2.weight")]
    assert [v.dtype.name for v in weights] == ["f32", "f32"]
    assert_close(logits(merged, x), logits(adapted, x), recipe)
    assert bw.unmerge_lora(merged) is adapted


def test_gradients_pass_quantized_activations_straight_through(quantized):
    adapted = trained(bw.add_lora(quantized["int8-static"], rank=RANKS), size=0.1)
    through = bw.train.straight_through(adapted)
    ops = [node.op for node in through.nodes]
    assert ops.count("fake_quantize") == 1 and ops.count("quantize") == 1  # of the input
    given = {"x": samples(17)["x"]}
    expected = run(adapted, given)["logits"]
    np.testing.assert_array_equal(run(through, given)["logits"], expected)
    exact = trained(bw.add_lora(quantized["w8"], rank=RANKS), size=0.1)
    one, other = (run(bw.grad(with_loss(g), loss="loss"), feeds()) for g in (through, exact))
    for name in ("grad.w1.lora_a", "grad.w1.lora_b", "grad.w2.lora_a", "grad.w2.lora_b"):
        error = np.linalg.norm(one[name] - other[name]) / np.linalg.norm(other[name])
        assert error < 0.1  # of quantized activations
    plain = mlp()
    assert bw.train.straight_through(plain) is plain


def test_a_step_runs_the_integer_products_of_the_model(quantized):
    from bitwright.backends.cpu.backend import BACKEND
    from bitwright.passes.manager import run_passes
    from bitwright.pipeline import TRAINING

    adapted = bw.add_lora(quantized["int8-static"], rank=RANKS)
    step = bw.Trainer(adapted, loss="cross_entropy").program.last_graph
    lowered = run_passes(step, (*TRAINING, *BACKEND.passes))
    ops = [node.op for _, node in lowered.walk()]
    assert ops.count("integer_matmul") == 2 and "fake_quantize" not in ops


def test_products_of_imported_blockwise_weights_take_adapters():
    rng = np.random.default_rng(0)
    b = bw.Builder("blockwise")
    q = b.constant(rng.integers(0, 16, (6, 8)), "u4", name="proj.weight")
    scale = b.constant(rng.uniform(0.1, 0.2, (6, 2)), "f32")
    zero = b.constant(rng.integers(0, 16, (6, 2)), "u4")
    bias = b.constant(rng.normal(size=6), "f32")
    x = b.input("x", "f32[batch, 8]")
    graph = b.build(y=b.dequant_matmul(x, q, scale, zero, bias, block=4))
    adapted = trained(bw.add_lora(graph, rank=2))
    merged = bw.merge_lora(adapted, dequantize=True).graph
    assert "dequant_matmul" not in [node.op for node in merged.nodes]
    given = {"x": rng.normal(size=(5, 8)).astype(np.float32)}
    found = run(merged, given)["y"]
    np.testing.assert_allclose(found, run(adapted, given)["y"], rtol=1e-5, atol=1e-5)
    assert not np.allclose(found, run(graph, given)["y"], atol=1e-2)


# merging


def test_merged_outputs_equal_those_with_adapters():
    x = samples(17)["x"]
    adapted = trained(bw.add_lora(mlp(), rank=RANKS, alpha=2))
    merged = bw.merge_lora(adapted)
    assert [v.name for v in merged.graph.parameters] == [v.name for v in mlp().parameters]
    assert all(v.node.attrs["trainable"] for v in merged.graph.parameters)
    np.testing.assert_allclose(logits(merged, x), logits(adapted, x), rtol=1e-4, atol=1e-5)
    arrays = {name: a.astype(np.float64) for name, a in parameters(adapted).items()}
    exact = arrays["w1"] + 0.5 * (arrays["w1.lora_a"] @ arrays["w1.lora_b"])
    np.testing.assert_array_equal(parameters(merged.graph)["w1"], exact.astype(np.float32))


def test_unmerging_gives_the_old_weights_back_bit_for_bit():
    adapted = trained(bw.add_lora(mlp(), rank=RANKS))
    again = bw.unmerge_lora(bw.merge_lora(adapted))
    for name, array in parameters(adapted).items():
        assert parameters(again)[name].tobytes() == array.tobytes()
    assert bw.to_text(again) == bw.to_text(adapted)
    assert bw.to_text(bw.remove_lora(again)) == bw.to_text(mlp())


def test_convolutions_and_frozen_batch_norm():
    graph = small_cnn()
    adapted = bw.add_lora(graph, rank=2)
    names = [v.name for v in adapted.parameters if v.name.endswith(".lora_a")]
    assert names == ["stem.lora_a", "last.lora_a", "head.lora_a"]  # not that with groups
    rng = np.random.default_rng(1)
    data = {
        "x": rng.normal(size=(16, 3, 9, 8)).astype(np.float32),
        "labels": rng.integers(0, 3, 16),
    }
    trainer, _ = fit(adapted, steps=0)
    history = trainer.fit(data, steps=20, batch_size=16)
    assert history.losses[-1] < history.losses[0]
    assert all(".lora_" in name for name in trainer.parameters())  # no running statistics
    merged = bw.merge_lora(trainer)
    x = data["x"]
    np.testing.assert_allclose(
        logits(merged, x), trainer.predict({"x": x})["logits"], rtol=1e-4, atol=1e-5
    )
    assert bw.to_text(bw.remove_lora(trainer)) == bw.to_text(graph)


def test_a_weight_that_others_read_stays_and_a_layer_used_twice_has_one_adapter():
    rng = np.random.default_rng(0)
    b = bw.Builder("tied")
    table = b.parameter("table", rng.normal(size=(7, 4)).astype(np.float32))
    cell = b.parameter("cell", rng.normal(size=(4, 4)).astype(np.float32))
    x = b.gather(table, b.input("ids", "i64[n]"), axis=0)
    x = b.tanh(b.matmul(b.tanh(b.matmul(x, cell)), cell))
    graph = b.build(logits=b.matmul(x, b.transpose(table, perm=(1, 0))))
    adapted = bw.add_lora(graph, rank=2)
    assert sum(v.name.endswith(".lora_a") for v in adapted.parameters) == 2
    adapted = trained(adapted)
    merged = bw.merge_lora(adapted).graph
    before, after = parameters(graph), parameters(merged)
    np.testing.assert_array_equal(after["table"], before["table"])
    assert not np.array_equal(after["cell"], before["cell"])
    assert set(after) - set(before) == {"table.weight"}
    given = {"ids": np.array([0, 6, 3])}
    expected = run(adapted, given)["logits"]
    np.testing.assert_allclose(run(merged, given)["logits"], expected, rtol=1e-4, atol=1e-5)


def test_a_model_in_half_precision_has_adapters_in_f32():
    b = bw.Builder("half")
    w = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float16)
    graph = b.build(y=b.matmul(b.input("x", "f16[n, 8]"), b.parameter("w", w)))
    adapted = trained(bw.add_lora(graph, rank=2))
    assert {a.dtype.name for n, a in parameters(adapted).items() if "lora" in n} == {"float32"}
    merged = bw.merge_lora(adapted).graph
    assert parameters(merged)["w"].dtype == np.float16
    given = {"x": np.linspace(-1, 1, 24).reshape(3, 8).astype(np.float16)}
    expected = run(adapted, given)["y"].astype(np.float32)
    np.testing.assert_allclose(run(merged, given)["y"], expected, rtol=0.02, atol=0.01)


# files


def test_adapters_are_saved_and_loaded_by_name(tmp_path, quantized):
    x, path = samples(17)["x"], tmp_path / "adapters.safetensors"
    adapted = trained(bw.add_lora(quantized["w4"], rank=RANKS, alpha=2))
    bw.save_lora(adapted, path)
    for start in (quantized["w4"], bw.add_lora(quantized["w4"], rank=RANKS, alpha=2)):
        loaded = bw.load_lora(start, path)
        assert bw.to_text(loaded) == bw.to_text(adapted)
    on_float = bw.load_lora(mlp(), path)  # what a weight-only model learned fits the float model
    for name, array in parameters(adapted).items():
        assert parameters(on_float)[name].tobytes() == array.tobytes()
    np.testing.assert_allclose(
        logits(bw.merge_lora(on_float), x), logits(on_float, x), rtol=1e-4, atol=1e-5
    )
    adapted.save(tmp_path / "adapted.bw")
    assert bw.to_text(bw.unmerge_lora(bw.merge_lora(tmp_path / "adapted.bw", dequantize=True))) == (
        bw.to_text(adapted)
    )


def test_files_that_do_not_fit_are_refused(tmp_path):
    path = tmp_path / "adapters.safetensors"
    bw.save_lora(bw.add_lora(mlp(), rank=RANKS), path)
    with pytest.raises(TrainingError, match="differ at 'w1'; expected scale 2"):
        bw.load_lora(bw.add_lora(mlp(), rank=RANKS, alpha=8), path)
    with pytest.raises(TrainingError, match="differ at 'w2'; expected no adapter"):
        bw.load_lora(bw.add_lora(mlp(), rank=4, layers="w1"), path)
    b = bw.Builder("other")
    x, w = b.input("x", "f32[n, 12]"), b.parameter("w1", np.zeros((12, 7), np.float32))
    other = b.build(y=b.matmul(x, w))
    with pytest.raises(TrainingError, match=r"does not fit layer 'w1'; expected \[12, 4\] and"):
        bw.load_lora(other, path)
    with pytest.raises(TrainingError, match="an adapter for 'stem', and the graph has no such"):
        bw.save_lora(bw.add_lora(small_cnn(), rank=2), path)
        bw.load_lora(mlp(), path)
    bw.Trainer(mlp(), loss="cross_entropy").save(path)
    with pytest.raises(TrainingError, match="is no file of adapters; expected one of"):
        bw.load_lora(mlp(), path)
    path.write_bytes(b"nothing")
    with pytest.raises(TrainingError, match="adapters cannot be read"):
        bw.load_lora(mlp(), path)


# errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": "w3"}, "'w3' of layers matches no layer .*for example, 'w1', 'w2'"),
        ({"layers": ["w1", "matmull"]}, "'matmull' of layers .*Did you mean 'matmul'"),
        ({"rank": 0}, "the rank is out of range; expected an integer above 0, found 0"),
        ({"rank": 2.5}, "the rank is out of range"),
        ({"rank": 6}, "rank 6 is too large for layer 'w2'.*16 terms and 5 outputs.*at most 5"),
        ({"rank": {"w1": 2}, "layers": "*"}, "no pattern of rank matches layer 'w2'"),
        ({"rank": 2, "alpha": 0}, "alpha is out of range"),
        ({"rank": 2, "train": "c*"}, "the pattern 'c\\*' of train matches no parameter"),
    ],
)
def test_wrong_settings_are_refused(options, message):
    with pytest.raises(TrainingError, match=message):
        bw.add_lora(mlp(), **options)


def test_wrong_models_are_refused(quantized):
    adapted = bw.add_lora(mlp(), rank=2)
    with pytest.raises(TrainingError, match=r"has adapters already.*merge_lora.*remove_lora"):
        bw.add_lora(adapted)
    for function in (bw.merge_lora, bw.remove_lora):
        with pytest.raises(TrainingError, match=r"has no adapters to .*bw.add_lora adds them"):
            function(mlp())
    with pytest.raises(TrainingError, match=r"cannot be unmerged.*bw.merge_lora returned"):
        bw.unmerge_lora(bw.merge_lora(adapted).graph)
    with pytest.raises(TrainingError, match="Add adapters to the quantized model"):
        bw.add_lora(bw.prepare_qat(quantized["int8-static"]))
    b = bw.Builder("plain")
    graph = b.build(y=b.relu(b.input("x", "f32[3]")))
    with pytest.raises(TrainingError, match="no layer that can have an adapter"):
        bw.add_lora(graph)
    b = bw.Builder("foreign")
    a = b.parameter("fc.lora_a", np.ones((4, 2), np.float32))
    graph = b.build(y=b.matmul(b.input("x", "f32[n, 4]"), a))
    with pytest.raises(TrainingError, match=r"'fc.lora_a' does not have the form"):
        bw.merge_lora(graph)
