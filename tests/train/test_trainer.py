"""`Trainer.fit`: forms of data, ends of runs, evaluations, early stop, interrupts."""

import json
import os
import signal

import numpy as np
import pytest
from training_models import batches, mlp, same_bits, samples

import bitwright as bw
from bitwright.errors import TrainingError


def new_trainer(graph=None, **options):
    options = {"loss": "cross_entropy", "optimizer": bw.SGD(lr=0.05), "threads": 1, **options}
    return bw.Trainer(mlp() if graph is None else graph, **options)


def fitted(data, graph=None, options=(), **how):
    trainer = new_trainer(graph, **dict(options))
    return trainer, trainer.fit(data, **{"epochs": 1, **how})


# forms of data


def in_order(data, size):
    """Arrays as batches."""
    count = len(data["x"])
    return [{n: a[k : k + size] for n, a in data.items()} for k in range(0, count, size)]


def test_the_same_batches_in_every_form_give_the_same_bits(tmp_path):
    data = samples(40)
    parts = in_order(data, 16)
    reference, history = fitted(data, batch_size=16, shuffle=False)
    assert len(history.losses) == 3  # the last batch has 8 samples
    np.savez(tmp_path / "data.npz", **data)
    forms = {
        "a list of dicts": parts,
        "tuples": [(p["x"], p["labels"]) for p in parts],
        "a generator": (p for p in parts),
        "a function of the epoch": lambda epoch: iter(parts),
        "further arrays": [{**p, "weight": p["x"]} for p in parts],
        "labels of another integer type": [
            {**p, "labels": p["labels"].astype("u1")} for p in parts
        ],
    }
    for name, form in forms.items():
        assert same_bits(fitted(form)[0], reference), name
    path = tmp_path / "data.npz"
    assert same_bits(fitted(path, batch_size=16, shuffle=False)[0], reference)


def test_pytorch_loaders_and_tensors():
    torch = pytest.importorskip("torch")
    data = samples(40)
    reference, _ = fitted(data, batch_size=16, shuffle=False)
    x, labels = torch.tensor(data["x"]), torch.tensor(data["labels"])
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, labels), batch_size=16)
    assert same_bits(fitted(loader)[0], reference)
    tensors = {"x": x, "labels": labels}
    assert same_bits(fitted(tensors, batch_size=16, shuffle=False)[0], reference)


def test_the_seed_decides_the_order_and_epochs_differ():
    data, seen = samples(32), {}
    for seed in (0, 0, 1, -3):
        order = []
        found = new_trainer(seed=seed).batches(data, 8)
        for epoch in range(2):
            order += [batch["x"][:, 0].tolist() for batch in found.epoch(epoch)]
        flat = np.concatenate(order)
        assert sorted(flat[:32]) == sorted(data["x"][:, 0]) == sorted(flat[32:])
        assert list(flat[:32]) != list(flat[32:])
        if seed in seen:
            assert seen[seed] == order
        seen[seed] = order
    assert seen[0] != seen[1] != seen[-3]


def test_a_fixed_batch_leaves_out_the_rest():
    trainer, history = fitted(samples(40), mlp(batch=16), epochs=2)
    assert len(history.losses) == 4
    with pytest.raises(TrainingError, match=r"fixed batch size; expected 16, found batch_size=8"):
        trainer.fit(samples(40), epochs=1, batch_size=8)
    with pytest.raises(TrainingError, match="fewer samples than the model's fixed batch"):
        trainer.fit(samples(10), epochs=1)


def test_epochs_steps_and_further_calls():
    data = samples(32)
    trainer = new_trainer()
    assert len(trainer.fit(data, epochs=2, batch_size=8).losses) == 8
    assert len(trainer.fit(data, steps=5, batch_size=8).losses) == 5
    assert len(trainer.fit(data, epochs=9, steps=3, batch_size=8).losses) == 3
    assert trainer.progress.step == 16
    assert trainer.fit(data, steps=0).losses == []
    with pytest.raises(TrainingError, match="the end of the run is missing"):
        trainer.fit(data)
    with pytest.raises(TrainingError, match="epochs is negative"):
        trainer.fit(data, epochs=-1)


def test_sizes_may_change_between_batches():
    many = [{n: a[:size] for n, a in samples(33).items()} for size in (16, 1, 33, 7)]
    _, history = fitted(many)
    assert len(history.losses) == 4 and np.isfinite(history.losses).all()


# evaluations


class Scores:
    """An evaluation function that gives numbers in order."""

    def __init__(self, *numbers):
        self.numbers, self.steps = list(numbers), []

    def __call__(self, trainer):
        self.steps.append(trainer.progress.step)
        return {"loss": self.numbers[len(self.steps) - 1], "accuracy": len(self.steps)}


def test_evaluation_is_the_mean_over_samples():
    data, trainer = samples(40), new_trainer()
    whole = trainer.evaluate([data])
    parts = trainer.evaluate(data, batch_size=16)
    assert whole.keys() == {"loss", "accuracy"}
    np.testing.assert_allclose(parts["loss"], whole["loss"], rtol=1e-6)
    np.testing.assert_allclose(parts["accuracy"], whole["accuracy"])
    logits = trainer.predict({"x": data["x"]})["logits"]
    np.testing.assert_allclose(whole["accuracy"], (logits.argmax(1) == data["labels"]).mean())


def test_evaluations_come_after_epochs_or_steps():
    data = batches(5, 8)
    scores = Scores(3, 2, 1)
    fitted(data, epochs=3, evaluate=scores)
    assert scores.steps == [5, 10, 15]
    scores = Scores(3, 2, 1)
    fitted(data, epochs=1, evaluate=scores, evaluate_every=2)
    assert scores.steps == [2, 4, 5]  # and at the end
    _, history = fitted(data, epochs=1, evaluate=samples(16))
    assert history.evaluations[0]["step"] == 5 and "accuracy" in history.evaluations[0]


def test_every_epoch_is_evaluated_if_steps_cross_its_end():
    scores = Scores(4, 3, 2, 1)
    fitted(batches(5, 8), options={"accumulate": 2}, epochs=4, evaluate=scores)
    assert scores.steps == [2, 5, 7, 10]


def test_the_best_model_is_kept_and_patience_stops():
    scores = Scores(3, 1, 2, 2, 0)
    trainer, history = fitted(batches(4, 8), epochs=9, evaluate=scores, patience=2)
    assert scores.steps == [4, 8, 12, 16]
    assert history.stopped == "loss did not improve in 2 evaluations"
    assert trainer.progress.best == 1 and trainer.progress.best_step == 8
    again, _ = fitted(batches(4, 8), epochs=2)
    for name, array in again.parameters().items():
        assert np.array_equal(trainer.parameters("best")[name], array)
        assert not np.array_equal(trainer.parameters()[name], array)
    trainer.fit(batches(4, 8), epochs=1, evaluate=Scores(0.5), patience=2)  # goes on
    assert trainer.progress.step == 20 and trainer.progress.best == 0.5


def test_other_metrics_count_upwards_and_nan_is_never_the_best():
    trainer, history = fitted(batches(2, 8), epochs=3, evaluate=Scores(1, 1, 1), metric="accuracy")
    assert trainer.progress.best == 3 and history.stopped == ""
    trainer, _ = fitted(batches(2, 8), epochs=3, evaluate=Scores(float("nan"), 2, float("nan")))
    assert trainer.progress.best == 2 and trainer.progress.stale == 1


def test_metrics_are_json_lines(tmp_path):
    path = tmp_path / "logs" / "run.jsonl"
    trainer = new_trainer(clip=1.0)
    trainer.fit(batches(6, 8), epochs=1, metrics=path, log_every=2, evaluate=samples(16))
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["step"] for r in records] == [2, 4, 6, 6]
    assert records[0].keys() == {"step", "loss", "lr", "speed", "grad_norm"}
    assert records[-1].keys() == {"step", "eval_loss", "eval_accuracy"}
    trainer.fit(batches(6, 8), epochs=1, metrics=path, log_every=3)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [
        2, 4, 6, 6, 9, 12,
    ]  # fmt: skip


# faults


def test_wrong_batches_are_named():
    trainer, data = new_trainer(), samples(8)
    for changed, message in (
        ({"labels": None}, "batch 0 of epoch .: the batch has no labels: 'labels' is missing"),
        ({"x": None}, "the batch has no input 'x'; expected 'x', 'labels', found 'labels'"),
        ({"x": data["x"].astype("f8")}, r"input 'x': has the wrong element type; expected f32"),
        ({"x": data["x"][:, :5]}, r"has the wrong size on axis 1; expected f32\[batch, 12\]"),
        ({"labels": data["labels"][:3]}, "has the wrong size on axis 0"),
        ({"labels": data["labels"] + 0.5}, r"input 'labels': has the wrong element type"),
    ):
        batch = {n: a for n, a in {**data, **changed}.items() if a is not None}
        with pytest.raises(TrainingError, match=message):
            trainer.fit([batch], steps=1)
    assert trainer.progress.step == 0


def test_wrong_data_and_options_are_named(tmp_path):
    trainer, data = new_trainer(), samples(8)
    for given, options, message in (
        (3, {}, "this is not training data"),
        ([], {}, "the data is empty"),
        ({**data, "x": data["x"][:4]}, {}, "different numbers of samples; found x: 4, labels: 8"),
        (iter([data]), {"epochs": 2}, "the data is empty.*An iterator can be read only once"),
        (data, {"batch_size": 0}, "batch_size is at least 1; found 0"),
        (data, {"patience": 2}, "patience needs evaluations"),
        (data, {"evaluate": data, "patience": 0}, "patience is out of range"),
        (data, {"evaluate": data, "evaluate_every": 0}, "evaluate_every is out of range"),
        (data, {"evaluate": data, "metric": "f1"}, "no 'f1'; expected loss, accuracy"),
        (data, {"evaluate": lambda trainer: 3.0}, "no numbers by name; expected a dict"),
        (data, {"evaluate": []}, "the data of the evaluation is empty"),
        (data, {"metrics": tmp_path}, "metrics cannot be written"),
        (data, {"resume": True}, "there is nothing to resume from"),
    ):
        with pytest.raises(TrainingError, match=message):
            trainer.fit(given, **{"epochs": 1, **options})
    with pytest.raises(bw.BitwrightError, match="input 'x' is missing"):
        trainer.predict({})
    with pytest.raises(TrainingError, match="there is no best model"):
        new_trainer().parameters("best")
    with pytest.raises(TrainingError, match="there are no parameters 'ema'"):
        trainer.parameters("ema")


def test_graphs_that_cannot_be_trained_are_named():
    def build(make):
        b = bw.Builder("odd")
        x = b.input("x", "f32[n, 3]")
        return b.build(**make(b, x))

    w = np.ones((3, 3), np.float32)

    def unused(b, x):
        b.parameter("lonely", w)
        return {"y": b.matmul(x, b.parameter("w", w)), "z": b.neg(b.nodes[-2].outputs[0])}

    with pytest.raises(TrainingError, match="the loss does not depend on 'lonely'"):
        new_trainer(build(unused), output="y")

    def rounded(b, x):
        y = b.matmul(x, b.parameter("w", w))
        return {"y": b.cast(b.argmax(y, axis=1, keepdims=True), to="f32")}

    with pytest.raises(TrainingError, match="no gradient reaches 'w'"):
        new_trainer(build(rounded), loss="mse")
    with pytest.raises(TrainingError, match=r"the name 'train\.w' is reserved"):
        new_trainer(build(lambda b, x: {"y": b.matmul(x, b.parameter("train.w", w))}), loss="mse")
    frozen = build(lambda b, x: {"y": b.matmul(x, b.parameter("w", w, trainable=False))})
    with pytest.raises(TrainingError, match="there is no trainable parameter"):
        new_trainer(frozen, loss="mse")


def test_a_loss_that_is_not_finite_names_step_and_op():
    data = batches(3, 8)
    data[1] = {**data[1], "x": np.full_like(data[1]["x"], 3.4e38)}
    trainer = new_trainer()
    message = "the loss of step 2 is (nan|inf): the first op that gives it is matmul %matmul"
    with pytest.raises(TrainingError, match=message):
        trainer.fit(data, epochs=1)
    assert trainer.progress.step == 1
    after = fitted(data[:1])[0]
    assert same_bits(trainer, after)  # the step changed nothing
    data[1]["x"][0, 0] = np.nan
    with pytest.raises(TrainingError, match="input 'x' of the batch holds NaN or infinity"):
        trainer.fit(data, epochs=1)


def test_masks_of_infinity_are_not_blamed():
    b = bw.Builder("masked")
    x, w = b.input("x", "f32[n, 4]"), b.parameter("w", np.eye(4, dtype=np.float32))
    mask = np.array([0, 0, 0, -np.inf], np.float32)
    chances = b.softmax(b.add(b.matmul(x, w), mask), axis=-1)
    graph = b.build(best=b.reduce_max(chances, axes=[0, 1], keepdims=False))
    trainer = new_trainer(graph, loss=lambda b, out: b.log(b.sub(out["best"], 1.0)))
    with pytest.raises(TrainingError, match="is nan: the first op that gives it is log"):
        trainer.fit([{"x": np.ones((2, 4), np.float32)}], steps=1)


# interrupts


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_interrupt_ends_after_the_step_and_saves(tmp_path, interruptible, accumulate):
    trainer = new_trainer(checkpoints=tmp_path, accumulate=accumulate)
    run, calls = trainer.program.run, []

    def run_and_interrupt(*args):
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)  # in the middle of a step
        return run(*args)

    trainer.program.run = run_and_interrupt
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(batches(12, 8), epochs=1)
    assert len(calls) == 3
    assert [p.name for p in trainer.checkpoints.paths()] == ["step-000000003.safetensors"]
    options = {"accumulate": accumulate}
    again = new_trainer(checkpoints=tmp_path, **options)
    again.fit(batches(12, 8), epochs=1, resume=True)
    assert same_bits(again, fitted(batches(12, 8), options=options)[0])


def test_a_step_that_fails_leaves_no_gradients_behind():
    trainer, good = new_trainer(accumulate=2), batches(4, 8)
    run = trainer.program._last.run

    def fail(feeds):
        raise bw.BitwrightError("no memory")

    trainer.program._last.run = fail
    with pytest.raises(TrainingError, match="step 1 failed: no memory"):
        trainer.fit(good, epochs=1)
    trainer.program._last.run = run
    trainer.fit(good, epochs=1)
    assert same_bits(trainer, fitted(good, options={"accumulate": 2})[0])
