"""Files of checkpoints: atomic writes, damage, other runs, and which of them stay."""

import json
import os

import numpy as np
import pytest
from training_models import batches, mlp, same_bits

import bitwright as bw
from bitwright.errors import BitwrightError, TrainingError
from bitwright.train.checkpoints import Checkpoints, Progress, read_checkpoint, write_checkpoint
from bitwright.train.safetensors_file import read_metadata, write_safetensors


def new_trainer(folder=None, every=2, keep=3, graph=None, **options):
    options = {"loss": "cross_entropy", "optimizer": bw.Adam(lr=0.01), "threads": 1, **options}
    checkpoints = None if folder is None else Checkpoints(folder, every=every, keep=keep)
    return bw.Trainer(mlp() if graph is None else graph, checkpoints=checkpoints, **options)


DATA = batches(12, 8)


@pytest.fixture(scope="module")
def run_of_6(tmp_path_factory):
    """The folder of a run with checkpoints of the steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("run")
    new_trainer(folder).fit(DATA, steps=6)
    return folder


@pytest.fixture
def folder(run_of_6, tmp_path):
    for path in run_of_6.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_last_files_stay(tmp_path):
    new_trainer(tmp_path, every=1, keep=2).fit(DATA, steps=5)
    assert names(tmp_path) == ["step-000000004.safetensors", "step-000000005.safetensors"]
    with pytest.raises(TrainingError, match="every and keep are at least 1"):
        Checkpoints(tmp_path, keep=0)


def test_a_file_has_all_states_and_other_tools_read_it(run_of_6):
    load = pytest.importorskip("safetensors.numpy").load_file
    states, progress = read_checkpoint(run_of_6 / "step-000000006.safetensors")
    trainer = new_trainer()
    trainer.fit(DATA, steps=6)
    assert states.keys() == trainer.program.states.keys()
    assert progress.step == 6 and progress.position.index == 6
    for name, array in load(run_of_6 / "step-000000006.safetensors").items():
        assert np.array_equal(array, trainer.program.states[name])


def test_a_write_that_fails_leaves_the_files_as_they_were(folder, monkeypatch):
    path = folder / "step-000000006.safetensors"
    before, listed = path.read_bytes(), names(folder)
    states, progress = read_checkpoint(path)

    def fail(*args):
        raise OSError(28, "No space left on device")

    for place in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, place, fail)
            with pytest.raises(BitwrightError, match="No space left on device"):
                write_checkpoint(path, states, progress, {})
        assert path.read_bytes() == before and names(folder) == listed


def test_damaged_files_are_named_with_the_next_good_one(folder):
    path = folder / "step-000000006.safetensors"
    whole = path.read_bytes()
    (folder / "step-000000004.safetensors").write_bytes(b"damaged too")
    listed = names(folder)
    rng = np.random.default_rng(0)
    damages = [whole[:n] for n in (0, 5, 8, 300, len(whole) - 1)]
    damages.append(b'\x18\0\0\0\0\0\0\0{"__metadata__": [1, 2]}')
    damages.append(b"\xff" * 100)
    for at in rng.integers(0, len(whole), 20):
        damages.append(whole[:at] + bytes([whole[at] ^ 1 << rng.integers(0, 8)]) + whole[at + 1 :])
    trainer = new_trainer(folder)
    before = {name: array.copy() for name, array in trainer.program.states.items()}
    for damage in damages:
        path.write_bytes(damage)
        with pytest.raises(TrainingError) as caught:
            trainer.fit(DATA, steps=12, resume=True)
        text = str(caught.value)
        assert "step-000000006.safetensors" in text
        if "damaged" in text or "cannot be read" in text:
            assert text.endswith("Remove it to resume from step-000000002.safetensors.")
    assert names(folder) == listed and trainer.progress == Progress()
    assert all(np.array_equal(trainer.program.states[n], a) for n, a in before.items())
    path.unlink()
    (folder / "step-000000004.safetensors").unlink()
    trainer.fit(DATA, steps=12, resume=True)
    whole_run = new_trainer()
    whole_run.fit(DATA, steps=12)
    assert same_bits(trainer, whole_run)


def test_files_of_other_kinds_and_versions_are_named(folder):
    path = folder / "step-000000006.safetensors"
    trainer = new_trainer(folder)
    states, _ = read_checkpoint(path)
    meta = read_metadata(path)
    write_safetensors(path, states, {**meta, "version": "0"})
    with pytest.raises(TrainingError, match="has another format; expected version 1, found"):
        trainer.fit(DATA, steps=12, resume=True)
    trainer.save(path)
    with pytest.raises(TrainingError, match="is not a training checkpoint"):
        trainer.fit(DATA, steps=12, resume=True)
    with pytest.raises(TrainingError, match=r"nowhere\.safetensors cannot be read"):
        trainer.fit(DATA, steps=12, resume=folder / "nowhere.safetensors")


def test_checkpoints_of_other_runs_are_refused(folder):
    for options, what in (
        ({"optimizer": bw.Adam(lr=0.02)}, "optimizer"),
        ({"optimizer": bw.SGD(lr=0.01)}, "optimizer"),
        ({"schedule": bw.train.cosine(9)}, "schedule"),
        ({"clip": 1.0}, "clip, accumulate, ema"),
        ({"seed": 1}, "seed"),
        ({"decay": {"w*": 0.1}}, "groups"),
        ({"precision": "bf16"}, "precision"),
        ({"batch_norm_momentum": 0.2}, "batch_norm_momentum"),
        ({"graph": mlp(batch=8)}, "structure"),
    ):
        trainer = new_trainer(folder, **options)
        with pytest.raises(TrainingError, match=f"belongs to another run: its {what} differs"):
            trainer.fit(DATA, steps=12, resume=True)


def test_functions_and_objects_may_be_losses_and_schedules(tmp_path):
    from functools import partial

    def halved(step, factor):
        return factor

    class Loss:
        def __call__(self, b, outputs):
            return b.reduce_mean(b.abs(outputs["logits"]), axes=[0, 1], keepdims=False)

    def make():
        options = {"loss": Loss(), "schedule": partial(halved, factor=0.5)}
        return new_trainer(tmp_path, **options)

    make().fit(DATA, steps=2)
    make().fit(DATA, steps=4, resume=True)  # no address of an object is compared


def test_a_folder_with_another_run_is_refused(folder):
    with pytest.raises(TrainingError, match="has checkpoints of an earlier run"):
        new_trainer(folder).fit(DATA, steps=1)
    with pytest.raises(TrainingError, match="checkpoints cannot be written to"):
        new_trainer(folder / "step-000000006.safetensors").fit(DATA, steps=1)


def test_continuing_from_an_earlier_file_needs_a_decision(folder):
    early = folder / "step-000000002.safetensors"
    trainer = new_trainer(folder, keep=1)
    with pytest.raises(TrainingError, match="has checkpoints after step 2: step-000000004"):
        trainer.fit(DATA, steps=12, resume=early)
    assert len(names(folder)) == 3
    for step in (4, 6):
        (folder / f"step-{step:09d}.safetensors").unlink()
    trainer.fit(DATA, steps=3, resume=early)
    assert names(folder) == ["step-000000003.safetensors"]


def test_files_that_a_killed_process_left_are_removed(folder):
    for name in (".step-000000008.safetensors.x1y2", ".best.safetensors.abc"):
        (folder / name).write_bytes(b"half")
    (folder / "step-notes.safetensors").write_bytes(b"not ours")
    new_trainer(folder, keep=1).fit(DATA, steps=8, resume=True)
    assert names(folder) == ["step-000000008.safetensors", "step-notes.safetensors"]


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    """The gradient of sqrt is infinite at 0, where the loss is finite."""
    b = bw.Builder("roots")
    x, w = b.input("x", "f32[n]"), b.parameter("w", np.float32(1))
    roots = b.sqrt(b.mul(b.mul(x, x), w))
    graph = b.build(loss=b.reduce_mean(roots, axes=[0], keepdims=False))
    data = [{"x": np.full(4, value, np.float32)} for value in (1, 0, 1)]
    good = "The last good checkpoint is .*step-000000001"
    for options, message in (
        ({}, "the gradient of 'w' is not finite in step 2: the first op that gives it is"),
        (
            {"clip": 1.0},
            "the norm of the gradients of step 2 is nan: the first op that gives it is",
        ),
    ):
        folder = tmp_path / message[4:9]
        trainer = new_trainer(folder, 1, 1, graph, loss="loss", optimizer=bw.SGD(lr=0.1), **options)
        with pytest.raises(TrainingError, match=f"{message}.*{good}"):
            trainer.fit(data, epochs=1)
        assert np.isfinite(trainer.parameters()["w"])
        states, _ = read_checkpoint(folder / "step-000000001.safetensors")
        assert np.isfinite(states["w"]) and len(names(folder)) == 1


def test_the_best_model_is_found_again(tmp_path):
    scores = iter([2.0, 1.0, 3.0])
    trainer = new_trainer(tmp_path)
    trainer.fit(DATA[:4], epochs=3, evaluate=lambda trainer: {"loss": next(scores)})
    best = trainer.parameters("best")
    again = new_trainer(tmp_path)
    again.fit(DATA[:4], epochs=3, resume=True)
    assert again.progress.best == 1.0 and again.progress.best_step == 8
    assert all(np.array_equal(again.parameters("best")[n], a) for n, a in best.items())


def test_metrics_of_a_resumed_run_have_each_line_once(tmp_path):
    path, scores = tmp_path / "run.jsonl", iter([4.0, 3.0, 2.0, 2.0, 1.0])

    def evaluate(trainer):
        return {"loss": next(scores)}

    how = {"epochs": 4, "evaluate": evaluate, "metrics": path, "log_every": 1}
    trainer = new_trainer(tmp_path / "run", every=4)
    save, saves = trainer._save, []

    def killed():
        save()
        saves.append(1)
        if len(saves) == 3:  # after step 12, before the evaluation of the third epoch
            raise MemoryError

    trainer._save = killed
    with pytest.raises(MemoryError):
        trainer.fit(DATA[:4], **how)
    with path.open("a") as file:  # later lines that the checkpoint does not know, one cut off
        file.write('{"step": 12, "eval_loss": 9}\n{"step": 13, "loss": 1}\n{"step": 14, "lo')
    new_trainer(tmp_path / "run", every=4).fit(DATA[:4], resume=True, **how)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["step"] for r in records if "loss" in r] == list(range(1, 17))
    found = [(r["step"], r["eval_loss"]) for r in records if "eval_loss" in r]
    assert found == [(4, 4.0), (8, 3.0), (12, 2.0), (16, 2.0)]
