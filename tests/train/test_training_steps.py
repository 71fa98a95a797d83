"""Compiled steps: networks against PyTorch, accumulation, averages, precisions, threads."""

import numpy as np
import pytest
from training_models import batches, mlp, samples

import bitwright as bw
from bitwright.errors import TrainingError
from bitwright.lir.schedule import InterpreterFallback
from bitwright.train.step import SCALE


def fit(graph=None, data=None, epochs=1, **options):
    options = {"loss": "cross_entropy", "optimizer": bw.AdamW(lr=0.01), **options}
    trainer = bw.Trainer(mlp() if graph is None else graph, **options)
    return trainer, trainer.fit(batches(10) if data is None else data, epochs=epochs)


def same_bits(one, other):
    first, second = one.program.states, other.program.states
    assert first.keys() == second.keys()
    return all(first[name].tobytes() == second[name].tobytes() for name in first)


def cnn():
    """A PyTorch network with convolutions, batch norm and pooling."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 12, 3, stride=2, padding=1),
        nn.BatchNorm2d(12, momentum=0.1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(12, 4),
    )


def images(count=8, size=8):
    rng = np.random.default_rng(3)
    return [
        (
            rng.normal(size=(size, 3, 10, 10)).astype(np.float32),
            rng.integers(0, 4, size),
        )
        for _ in range(count)
    ]


def test_a_cnn_with_batch_norm_follows_pytorch_step_by_step():
    torch = pytest.importorskip("torch")
    module, data = cnn(), images()
    graph = bw.from_torch(
        module.eval(), (torch.zeros(2, 3, 10, 10),), dynamic_shapes={"input": {0: "batch"}}
    )
    trainer = bw.Trainer(
        graph, loss="cross_entropy", optimizer=bw.SGD(lr=0.1, momentum=0.9, weight_decay=1e-3)
    )
    history = trainer.fit(data, epochs=1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    module.train()
    expected = []
    for x, labels in data:
        loss = torch.nn.functional.cross_entropy(module(torch.tensor(x)), torch.tensor(labels))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    np.testing.assert_allclose(history.losses, expected, rtol=1e-4)
    module.eval()
    state = module.state_dict()
    for name, array in trainer.parameters().items():
        np.testing.assert_allclose(array, state[name].numpy(), rtol=1e-3, atol=1e-4, err_msg=name)
    assert "1.running_var" in trainer.parameters()
    x = data[0][0]
    ours = trainer.predict({"input": x})["output"]
    np.testing.assert_allclose(ours, module(torch.tensor(x)).detach().numpy(), rtol=1e-3, atol=1e-3)
    compiled = bw.compile(trainer.model()).run({"input": x})["output"]
    np.testing.assert_allclose(compiled, ours, rtol=1e-4, atol=1e-4)
    fresh = cnn().eval()
    trainer.load_into(fresh)
    np.testing.assert_allclose(fresh(torch.tensor(x)).detach().numpy(), ours, rtol=1e-4, atol=1e-4)


def test_batch_norm_statistics_can_stay_frozen():
    torch = pytest.importorskip("torch")
    graph = bw.from_torch(cnn().eval(), (torch.zeros(8, 3, 10, 10),))
    trainer = bw.Trainer(graph, loss="cross_entropy", batch_norm_momentum=None)
    trainer.fit(images(2), epochs=1)
    assert not any("running" in name for name in trainer.parameters())


def test_accumulation_equals_a_larger_batch():
    data = batches(4, size=16)
    halves = [
        {name: array[part] for name, array in batch.items()}
        for batch in data
        for part in (slice(0, 8), slice(8, 16))
    ]
    large, whole = fit(data=data, clip=0.5)
    small, parts = fit(data=halves, accumulate=2, clip=0.5)
    np.testing.assert_allclose(parts.losses, whole.losses, rtol=1e-6)
    for name, array in large.parameters().items():
        np.testing.assert_allclose(small.parameters()[name], array, rtol=1e-4, atol=1e-6)


def test_averages_follow_the_weights():
    trainer, _ = fit(data=batches(5), ema=0.9)
    expected = {v.name: v.node.attrs["value"].astype(np.float64) for v in mlp().parameters}
    replay = bw.Trainer(mlp(), loss="cross_entropy", optimizer=bw.AdamW(lr=0.01))
    for batch in batches(5):
        replay.fit([batch], steps=1)
        weights = replay.parameters()
        expected = {n: 0.9 * e + 0.1 * weights[n] for n, e in expected.items()}
    for name, array in trainer.parameters("ema").items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-5, atol=1e-6)
    found = trainer.predict({"x": samples()["x"]})["logits"]
    averaged = bw.compile(trainer.graph("ema")).run({"x": samples()["x"]})["logits"]
    np.testing.assert_allclose(found, averaged, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("precision", ["bf16", "f16"])
def test_half_precision_follows_f32_with_master_weights_in_f32(precision):
    _, full = fit(epochs=3)
    trainer, half = fit(epochs=3, precision=precision)
    np.testing.assert_allclose(half.losses, full.losses, rtol=0.03)
    assert {array.dtype.name for array in trainer.parameters().values()} == {"float32"}
    ops = {node.op: node.outputs[0].dtype.name for node in trainer.program.last_graph.nodes}
    assert ops["matmul"] == precision
    assert half.skipped == 0


def test_an_overflow_halves_the_scale_and_changes_nothing_else():
    trainer = bw.Trainer(mlp(), loss="cross_entropy", optimizer="sgd", precision="f16")
    before = {name: array.copy() for name, array in trainer.program.states.items()}
    batch = batches(1)[0]
    batch["x"] = batch["x"] * np.float32(1e5)
    history = trainer.fit([batch], steps=1)
    assert history.skipped == 1
    assert trainer.loss_scale == before[SCALE] / 2
    for name, array in trainer.program.states.items():
        assert name == SCALE or array.tobytes() == before[name].tobytes(), name


def test_the_scale_doubles_after_many_good_steps():
    trainer = bw.Trainer(mlp(), loss="cross_entropy", optimizer="sgd", precision="f16")
    scale = trainer.loss_scale
    trainer.program.states["train.good_steps"][...] = 1999
    trainer.fit(batches(1), steps=1)
    assert trainer.loss_scale == 2 * scale
    assert trainer.program.states["train.good_steps"] == 0


def recurrent():
    """Two recurrent layers and a linear one over x[batch, 6] as a sequence of 6 elements."""
    rng = np.random.default_rng(5)

    def weight(name, *shape):
        return b.parameter(name, rng.normal(0, 0.3, shape).astype(np.float32))

    b = bw.Builder("recurrent")
    batch = b.input("x", "f32[batch, 6]")
    x = b.reshape(b.transpose(batch, perm=(1, 0)), shape=(6, batch.shape[0], 1))
    y, _, _ = b.lstm(x, weight("w1", 1, 32, 1), weight("r1", 1, 32, 8), weight("bias1", 1, 64))
    y = b.reshape(y, shape=(6, batch.shape[0], 8))
    _, last = b.gru(y, weight("w2", 1, 24, 8), weight("r2", 1, 24, 8))
    head = weight("head", 8, 4)
    return b.build(logits=b.matmul(b.reshape(last, shape=(batch.shape[0], 8)), head))


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_recurrent_layers_are_computed_once_and_by_kernels(precision):
    rng = np.random.default_rng(1)
    data = [
        {"x": rng.normal(size=(16, 6)).astype(np.float32), "labels": rng.integers(0, 4, 16)}
        for _ in range(2)
    ]
    trainer, _ = fit(recurrent(), data, precision=precision, threads=2)
    ops = [node.op for node in trainer.program.last_graph.nodes]
    assert ops.count("lstm_train") == ops.count("gru_train") == 1
    assert "lstm" not in ops and "gru" not in ops
    steps = trainer.program._last.engine.schedule.steps
    fallbacks = {step.op.op for step in steps if isinstance(step, InterpreterFallback)}
    assert not any(op.startswith(("lstm", "gru")) for op in fallbacks)
    other, _ = fit(recurrent(), data, precision=precision, threads=1)
    assert same_bits(trainer, other)


def test_threads_do_not_change_bits():
    one, _ = fit(epochs=2, threads=1, clip=0.5, ema=0.99)
    two, _ = fit(epochs=2, threads=2, clip=0.5, ema=0.99)
    assert same_bits(one, two)


def test_the_interpreter_runs_the_same_step():
    compiled, ours = fit(data=batches(3))
    _, reference = fit(data=batches(3), target="reference")
    np.testing.assert_allclose(ours.losses, reference.losses, rtol=1e-5)
    assert compiled.program.states["train.step"] == 3


def test_parameters_and_moments_are_updated_in_place():
    trainer, _ = fit(data=batches(1))
    steps = trainer.program._last.engine.schedule.steps
    written = {b.name for s in steps for b in s.writes if s.kernel.startswith("adam_update")}
    assert {"w1", "train.exp_avg.w1", "train.exp_avg_sq.w1"} <= written


def test_an_output_or_a_function_can_be_the_loss():
    b = bw.Builder("regression")
    x, t = b.input("x", "f32[n, 3]"), b.input("t", "f32[n, 1]")
    y = b.matmul(x, b.parameter("w", np.zeros((3, 1), np.float32)))
    d = b.sub(y, t)
    graph = b.build(y=y, error=b.reduce_mean(b.mul(d, d), axes=(0, 1), keepdims=False))
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(64, 3)).astype(np.float32)
    targets = inputs @ np.array([[1], [2], [-1]], np.float32)
    trainer = bw.Trainer(graph, loss="error", optimizer=bw.SGD(lr=0.3))
    trainer.fit([(inputs, targets)], steps=100)
    np.testing.assert_allclose(trainer.parameters()["w"][:, 0], [1, 2, -1], atol=1e-3)

    def doubled(b, outputs):
        return b.mul(outputs["error"], 2.0)

    other = bw.Trainer(graph, loss=doubled, optimizer=bw.SGD(lr=0.15))
    other.fit([(inputs, targets)], steps=100)
    np.testing.assert_allclose(other.parameters()["w"], trainer.parameters()["w"], rtol=1e-5)


@pytest.mark.parametrize("kind", ["mse", "l1", "cosine", "binary_cross_entropy"])
def test_named_losses_agree_with_pytorch(kind):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(6, 12)).astype(np.float32)
    targets = rng.uniform(0, 1, (6, 5)).astype(np.float32)
    trainer = bw.Trainer(mlp(), loss=kind, optimizer="sgd")
    y = bw.compile(mlp()).run({"x": x})["logits"]
    ours = trainer.evaluate([{"x": x, "labels": targets}])["loss"]
    f = torch.nn.functional
    expected = {
        "mse": lambda a, b: f.mse_loss(a, b),
        "l1": lambda a, b: f.l1_loss(a, b),
        "cosine": lambda a, b: 1 - f.cosine_similarity(a, b).mean(),
        "binary_cross_entropy": lambda a, b: f.binary_cross_entropy_with_logits(a, b),
    }[kind](torch.tensor(y), torch.tensor(targets))
    np.testing.assert_allclose(ours, float(expected), rtol=1e-5)


def test_token_cross_entropy_ignores_padding():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    b = bw.Builder("lm")
    tokens = b.input("tokens", "i64[batch, length]")
    table = b.parameter("table", rng.normal(size=(7, 4)).astype(np.float32))
    head = b.parameter("head", rng.normal(size=(4, 7)).astype(np.float32))
    graph = b.build(logits=b.matmul(b.gather(table, tokens, axis=0), head))
    trainer = bw.Trainer(graph, loss="token_cross_entropy")
    given, labels = rng.integers(0, 7, (2, 5)), rng.integers(0, 7, (2, 5))
    labels[0, 3:] = -100
    ours = trainer.evaluate([{"tokens": given, "labels": labels}])["loss"]
    y = torch.tensor(bw.compile(graph).run({"tokens": given})["logits"])
    expected = torch.nn.functional.cross_entropy(y.reshape(-1, 7), torch.tensor(labels).flatten())
    np.testing.assert_allclose(ours, float(expected), rtol=1e-5)
    history = trainer.fit([{"tokens": given, "labels": labels}], steps=5)
    assert history.losses[-1] < history.losses[0]


def test_a_teacher_needs_no_labels():
    teacher = mlp(seed=5)
    x = samples(256)["x"]
    wanted = bw.compile(teacher).run({"x": x})["logits"]
    for kind in ("kl", "mse"):
        trainer = bw.Trainer(
            mlp(), teacher=teacher, distillation=kind, temperature=2.0, optimizer=bw.Adam(lr=0.02)
        )
        history = trainer.fit({"x": x}, epochs=40, batch_size=64)
        assert history.losses[-1] < 0.05 * history.losses[0]
        found = trainer.predict({"x": x})["logits"]
        agree = np.mean(found.argmax(1) == wanted.argmax(1))
        assert agree > 0.8, (kind, agree)


def test_distillation_agrees_with_pytorch():
    torch = pytest.importorskip("torch")
    student, teacher, x = mlp(), mlp(seed=5), samples()["x"]
    trainer = bw.Trainer(student, teacher=teacher, temperature=3.0)
    ours = trainer.evaluate([{"x": x}])["loss"]
    s, t = (torch.tensor(bw.compile(g).run({"x": x})["logits"]) / 3 for g in (student, teacher))
    f = torch.nn.functional
    expected = f.kl_div(s.log_softmax(1), t.log_softmax(1), reduction="batchmean", log_target=True)
    np.testing.assert_allclose(ours, 9 * float(expected), rtol=1e-5)


def test_extra_passes_run_on_steps_and_on_evaluations():
    seen = []

    def watch(graph, trace):
        seen.append({name for name, _ in graph.outputs})
        return graph

    trainer = bw.Trainer(mlp(), loss="cross_entropy", passes=(watch,))
    assert seen == [{"loss"}]
    trainer.evaluate(samples())
    assert {"logits", "train.loss", "train.accuracy"} in seen


def test_precisions_and_settings_out_of_range_are_named():
    for options, message in (
        ({"precision": "f8"}, "there is no precision 'f8' of training; expected f32, bf16, f16"),
        ({"clip": 0.0}, "clip is out of range"),
        ({"accumulate": 0}, "accumulate is out of range"),
        ({"ema": 1.0}, "ema is out of range"),
    ):
        with pytest.raises(TrainingError, match=message):
            bw.Trainer(mlp(), loss="cross_entropy", **options)
