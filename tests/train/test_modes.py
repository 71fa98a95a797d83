"""Dropout and batch norm in training and in evaluation, and trained weights in PyTorch."""

import numpy as np
import pytest
from training_models import SIZES, batches, mlp, regularized, same_bits, samples

import bitwright as bw
from bitwright.errors import TrainingError
from bitwright.ops.math.dropout import kept
from bitwright.warn import BitwrightWarning


def new_trainer(graph, **options):
    options = {"loss": "cross_entropy", "optimizer": bw.Adam(lr=0.01), "threads": 1, **options}
    return bw.Trainer(graph, **options)


# dropout


def dropout_graph(rate=0.25, count=2):
    """Dropouts of a parameter of ones; the loss is a sum of the results."""
    b = bw.Builder("dropouts")
    x = b.input("x", "f32[]")
    ones = b.add(b.parameter("w", np.ones((40, 50), np.float32)), x)
    found = {f"y{n}": b.dropout(ones, b.constant(np.int64(n)), rate=rate) for n in range(count)}
    total = b.add(*(b.reduce_mean(y, axes=[0, 1], keepdims=False) for y in found.values()))
    return b.build(loss=total, **found)


def test_rates_are_kept_and_keys_are_independent():
    for rate in (0.0, 0.1, 0.5, 1.0):
        masks = np.array([kept(key * 2**33 + 5, 4000, rate) for key in range(20)])
        assert abs(masks.mean() - (1 - rate)) < 0.01
    masks = np.array([kept(key, 4000, 0.5) for key in range(-10, 10)]).astype(float)
    correlation = np.corrcoef(masks) - np.eye(20)
    assert np.abs(correlation).max() < 0.08
    assert abs(np.corrcoef(masks[0][1:], masks[0][:-1])[0, 1]) < 0.08


def test_masks_differ_by_step_place_and_seed_and_gradients_use_them():
    gradients = []
    for seed in (0, 0, 1):
        trainer = new_trainer(dropout_graph(), loss="loss", optimizer=bw.SGD(lr=1.0), seed=seed)
        before = trainer.parameters()["w"]
        for _ in range(2):
            trainer.fit([{"x": np.float32(0)}], steps=1)
            after = trainer.parameters()["w"]
            gradients.append((before - after) * 2000)
            before = after
    first, second, again, _, other, _ = gradients
    assert np.array_equal(first, again)  # the same seed
    assert not np.array_equal(first, second) and not np.array_equal(first, other)
    # each weight got 4/3 from each dropout that kept it: two masks, not one
    counts = np.round(first * 0.75).astype(int)
    np.testing.assert_allclose(first * 0.75, counts, atol=1e-3)
    shares = [(counts == n).mean() for n in range(3)]
    np.testing.assert_allclose(shares, [1 / 16, 6 / 16, 9 / 16], atol=0.04)


def test_evaluation_and_the_trained_model_do_not_drop():
    trainer = new_trainer(regularized())
    trainer.fit(batches(4, 16), epochs=1)
    x = samples(32)["x"]
    found = trainer.predict({"x": x})["logits"]
    assert np.array_equal(trainer.predict({"x": x})["logits"], found)
    p = {n: a.astype(np.float64) for n, a in trainer.parameters().items()}
    h = (x @ p["w1"] - p["mean"]) / np.sqrt(p["var"] + 1e-5) * p["scale"] + p["bias"]
    np.testing.assert_allclose(found, np.maximum(h, 0) @ p["w2"], rtol=1e-4, atol=1e-5)
    model = trainer.model()
    assert "dropout" not in {node.op for node in model.nodes}
    compiled = bw.compile(model).run({"x": x})["logits"]
    np.testing.assert_allclose(compiled, found, rtol=1e-5, atol=1e-5)


def test_a_teacher_does_not_drop():
    trainer = new_trainer(mlp(), loss=None, teacher=regularized())
    data = [{"x": samples(16)["x"]}]
    assert trainer.evaluate(data) == trainer.evaluate(data)


def test_threads_do_not_change_the_bits_of_dropout_and_batch_norm():
    found = []
    for threads in (1, 2, 3):
        trainer = new_trainer(regularized(), threads=threads)
        trainer.fit(batches(5, 33), epochs=1)
        found.append(trainer)
    assert same_bits(found[0], found[1]) and same_bits(found[0], found[2])


# batch norm


def test_one_sample_leaves_the_running_statistics():
    trainer = new_trainer(regularized())
    trainer.fit(samples(17), batch_size=16, epochs=1)  # the last batch has one sample
    for name in ("mean", "var"):
        assert np.isfinite(trainer.parameters()[name]).all()
    before = trainer.parameters()
    trainer.fit(samples(1), steps=1)
    assert np.array_equal(trainer.parameters()["var"], before["var"])


def test_frozen_statistics_stay():
    trainer = new_trainer(regularized(), freeze=["mean", "var", "scale"])
    trainer.fit(batches(2, 16), epochs=1)
    assert trainer.parameters().keys() == {"w1", "bias", "w2"}


def network(momentum=0.1):
    from torch import nn

    inside, hidden, classes = SIZES
    return nn.Sequential(
        nn.Linear(inside, hidden),
        nn.BatchNorm1d(hidden, momentum=momentum),
        nn.ReLU(),
        nn.Linear(hidden, classes),
    )


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_batch_norm_follows_pytorch(mode, tmp_path):
    """Modules in both modes give the same training; the momentum is the module's, or 0.1."""
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    torch.manual_seed(3)
    module = network(0.3 if mode == "train" else 0.1)
    example = (torch.zeros(4, SIZES[0]),)
    graph = bw.from_torch(getattr(module, mode)(), example, dynamic_shapes={"input": {0: "batch"}})
    trainer = new_trainer(graph, optimizer=bw.SGD(lr=0.1))
    data = [(batch["x"], batch["labels"]) for batch in batches(5, 16)]
    trainer.fit(data, epochs=1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module.train()
    for x, labels in data:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(module(torch.tensor(x)), torch.tensor(labels)).backward()
        optimizer.step()
    state = module.eval().state_dict()
    found = trainer.parameters()
    for name in ("1.running_mean", "1.running_var", "0.weight", "3.bias"):
        wanted = state[name].numpy()
        np.testing.assert_allclose(found[name], wanted, rtol=1e-4, atol=1e-6, err_msg=name)
    x = data[0][0]
    wanted = module(torch.tensor(x)).detach().numpy()
    np.testing.assert_allclose(
        trainer.predict({"input": x})["output"], wanted, rtol=1e-4, atol=1e-5
    )
    compiled = bw.compile(trainer.model()).run({"input": x})["output"]
    np.testing.assert_allclose(compiled, wanted, rtol=1e-4, atol=1e-5)

    trainer.save(tmp_path / "weights.safetensors")
    loaded = network()
    loaded.load_state_dict(safetensors.load_file(tmp_path / "weights.safetensors"))
    copied = network()
    trainer.load_into(copied)
    for other in (loaded, copied):
        for name, array in found.items():
            assert np.array_equal(other.state_dict()[name].numpy(), array), name
    with pytest.raises(TrainingError, match=r"the module has no parameter '0\.weight'"):
        trainer.load_into(torch.nn.Linear(2, 2))
    with pytest.raises(TrainingError, match="has another shape; expected"):
        trainer.load_into(torch.nn.Sequential(torch.nn.Linear(2, 2), *network()[1:]))
    trainer.save(tmp_path / "model.onnx")
    again = bw.compile(tmp_path / "model.onnx").run({"input": x})["output"]
    np.testing.assert_allclose(again, wanted, rtol=1e-4, atol=1e-5)


def test_dropout_of_modules_in_training_mode():
    torch = pytest.importorskip("torch")
    module = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(12, 5))
    with pytest.warns(BitwrightWarning, match="the module is in training mode"):
        graph = bw.from_torch(module, (torch.zeros(4, 12),), dynamic_shapes={"input": {0: "batch"}})
    runs = [new_trainer(graph) for _ in range(2)]
    losses = []
    for trainer in runs:
        data = [(batch["x"], batch["labels"]) for batch in batches(4, 16)]
        losses.append(trainer.fit(data, epochs=1).losses)
    assert losses[0] == losses[1] and same_bits(*runs)
    x = samples(16)["x"]
    plain = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(12, 5)).eval()
    runs[0].load_into(plain)
    wanted = plain(torch.tensor(x)).detach().numpy()
    np.testing.assert_allclose(
        runs[0].predict({"input": x})["output"], wanted, rtol=1e-4, atol=1e-5
    )


# precision


@pytest.mark.parametrize("precision", ["bf16", "f16"])
def test_half_precision_converges_with_dropout_and_batch_norm(precision):
    data = samples(256)
    data["labels"] = np.argmax(data["x"][:, :5], axis=1)
    trainer = new_trainer(regularized(), precision=precision, optimizer=bw.Adam(lr=0.02))
    before = trainer.evaluate(data)["accuracy"]
    trainer.fit(data, epochs=12, batch_size=64)
    assert trainer.evaluate(data)["accuracy"] > max(0.8, before)
    assert {a.dtype.name for a in trainer.parameters().values()} == {"float32"}


def test_an_overflow_in_an_accumulated_batch_skips_the_whole_step():
    data = batches(6, 16)
    data[2] = {**data[2], "x": data[2]["x"] * np.float32(3e4)}
    trainer = new_trainer(mlp(), precision="f16", accumulate=2, optimizer=bw.SGD(lr=0.05))
    history = trainer.fit(data, epochs=1)
    assert history.skipped == 1 and trainer.loss_scale == 2.0**14
    clean = new_trainer(mlp(), precision="f16", accumulate=2, optimizer=bw.SGD(lr=0.05))
    clean.fit(data[:2] + data[4:], epochs=1)
    for name, array in clean.parameters().items():
        np.testing.assert_allclose(trainer.parameters()[name], array, rtol=1e-3, atol=1e-5)
