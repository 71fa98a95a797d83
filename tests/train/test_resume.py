"""A run that is interrupted and resumed is the same run, bit for bit."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from training_models import batches, mlp, regularized, same_bits, samples

import bitwright as bw
from bitwright.errors import TrainingError

CASES = {
    "plain": {},
    "accumulation and averages": {"accumulate": 2, "ema": 0.9, "clip": 0.5},
    "f16": {"precision": "f16"},
    "a schedule and decays": {
        "schedule": bw.train.warmup(5) * bw.train.cosine(20),
        "optimizer": bw.AdamW(lr=0.01),
        "decay": {"bias": 0.0},
    },
    "momentum": {"optimizer": bw.SGD(lr=0.05, momentum=0.9, nesterov=True)},
}


def new_trainer(folder, graph=None, every=None, **options):
    options = {"loss": "cross_entropy", "optimizer": bw.Adam(lr=0.01), "threads": 1, **options}
    checkpoints = None if folder is None else bw.train.Checkpoints(folder, every=every)
    return bw.Trainer(regularized() if graph is None else graph, checkpoints=checkpoints, **options)


def check(tmp_path, data, whole, parts, options=(), **how):
    """Run once, and in parts of so many steps; compare all states and losses."""
    one = new_trainer(None, **dict(options))
    losses = one.fit(data, **whole, **how).losses
    found = []
    for steps in (*parts, None):
        other = new_trainer(tmp_path / "parts", **dict(options))
        ends = whole if steps is None else {**whole, "steps": steps}
        found += other.fit(data, resume=True, **ends, **how).losses
    np.testing.assert_array_equal(found, losses)  # NaN where f16 overflowed
    assert same_bits(one, other)
    return one, other


@pytest.mark.parametrize("case", CASES)
def test_shuffled_arrays(tmp_path, case):
    """Batches of 8 of 45 samples; parts end inside epochs and at their ends."""
    check(tmp_path, samples(45), {"epochs": 4}, (1, 6, 9), CASES[case], batch_size=8)


def test_an_overflow_of_f16_before_the_checkpoint(tmp_path):
    data = batches(8, 16)
    data[2] = {**data[2], "x": data[2]["x"] * np.float32(3e4)}
    options = {"graph": mlp(), "precision": "f16"}
    one, other = check(tmp_path, data, {"steps": 16}, (5,), options)
    assert one.loss_scale == other.loss_scale < 2**15


def test_functions_that_draw_random_numbers(tmp_path):
    def data(epoch):
        for batch in batches(6, 8, seed=epoch):
            noise = np.random.normal(size=batch["x"].shape) * random.random()
            yield {**batch, "x": batch["x"] + noise.astype(np.float32)}

    state = np.random.get_state()[1].copy(), random.getstate()
    check(tmp_path, data, {"epochs": 3}, (4, 9))
    assert np.array_equal(np.random.get_state()[1], state[0])
    assert random.getstate() == state[1]


@pytest.mark.parametrize("own", [False, True])
def test_pytorch_loaders_with_augmentation(tmp_path, own):
    """Evaluations with another loader, and draws of other code, change nothing."""
    torch = pytest.importorskip("torch")
    data = samples(45)

    class Noisy(torch.utils.data.Dataset):
        def __len__(self):
            return 45

        def __getitem__(self, index):
            noise = torch.randn(12).numpy() * random.random()
            return {"x": data["x"][index] + noise, "labels": data["labels"][index]}

    def loader():
        how = {"shuffle": True}
        if own:
            generator = torch.Generator()
            generator.manual_seed(random.getrandbits(32))
            sampler = torch.utils.data.RandomSampler(range(45), generator=generator)
            how = {"sampler": sampler}
        return torch.utils.data.DataLoader(Noisy(), batch_size=8, **how)

    def fit(trainer, **how):
        torch.manual_seed(random.getrandbits(32))
        return trainer.fit(loader(), evaluate=loader(), evaluate_every=2, **how)

    one = new_trainer(None)
    losses = fit(one, epochs=3).losses
    found = []
    for ends in ({"steps": 3}, {"steps": 11}, {"epochs": 3}):
        other = new_trainer(tmp_path)
        found += fit(other, resume=True, **ends).losses
    assert found == losses and same_bits(one, other)


def test_an_early_stop_is_final(tmp_path):
    """A run that stopped is not continued, and its evaluations are not repeated."""
    for every in (None, 3):
        calls = []

        def evaluate(trainer, calls=calls):
            calls.append(trainer.progress.step)
            return {"loss": 1.0 if len(calls) == 1 else 2.0}

        folder = tmp_path / str(every)
        how = {"epochs": 9, "evaluate": evaluate, "patience": 2, "evaluate_every": every}
        one = new_trainer(folder)
        one.fit(batches(4, 8), **how)
        assert calls == ([4, 8, 12] if every is None else [3, 6, 9])
        assert one.checkpoints.paths()[-1].name == f"step-{calls[-1]:09d}.safetensors"
        other = new_trainer(folder)
        history = other.fit(batches(4, 8), resume=True, **how)
        assert history.losses == [] and len(calls) == 3
        assert same_bits(one, other)
        assert other.progress == one.progress


def test_an_evaluation_that_was_interrupted_is_done_first(tmp_path):
    calls = []

    def evaluate(trainer):
        calls.append(trainer.progress.step)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return {"loss": 1 / len(calls)}

    how = {"epochs": 3, "evaluate": evaluate}
    with pytest.raises(KeyboardInterrupt):
        new_trainer(tmp_path).fit(batches(4, 8), **how)
    other = new_trainer(tmp_path)
    other.fit(batches(4, 8), resume=True, **how)
    assert calls == [4, 8, 8, 12]
    assert other.progress.best_step == 12


def test_a_finished_run_with_a_rest_of_batches_stays_finished(tmp_path):
    options = {"accumulate": 2}
    one = new_trainer(tmp_path, **options)
    one.fit(batches(5, 8), epochs=1)
    other = new_trainer(tmp_path, **options)
    assert other.fit(batches(5, 8), epochs=1, resume=True).losses == []
    assert same_bits(one, other)


def test_other_batches_are_refused_inside_an_epoch(tmp_path):
    new_trainer(tmp_path).fit(samples(40), steps=3, batch_size=8)
    message = "interrupted in an epoch of other data; expected 5 batches, found 10 batches"
    with pytest.raises(TrainingError, match=message):
        new_trainer(tmp_path).fit(samples(40), steps=9, batch_size=4, resume=True)


def test_resuming_without_a_checkpoint_starts(tmp_path):
    assert len(new_trainer(tmp_path).fit(batches(4, 8), steps=2, resume=True).losses) == 2


# processes

STEPS, TURN = 200, 40
SCRIPT = f"""
import sys
sys.path.insert(0, sys.argv[1])
import bitwright as bw
import numpy as np
from training_models import batches, regularized

def data(epoch):
    for batch in batches(13, 16, seed=epoch):
        sys.stdin.read(1)
        sys.stdout.write(".")
        sys.stdout.flush()
        noise = np.random.normal(size=batch["x"].shape)
        yield {{**batch, "x": batch["x"] + noise.astype(np.float32)}}

trainer = bw.Trainer(
    regularized(), loss="cross_entropy", optimizer=bw.Adam(lr=0.01), ema=0.99, threads=2,
    checkpoints=bw.train.Checkpoints(sys.argv[2], every=3, keep=2),
)
trainer.fit(data, steps={STEPS}, resume=True, evaluate=lambda t: {{"loss": 1.0}})
"""


def start(folder, cache):
    command = [sys.executable, "-c", SCRIPT, str(Path(__file__).parent), str(folder)]
    environment = {**os.environ, "BITWRIGHT_CACHE": str(cache)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, env=environment, **pipes)


def finish(process):
    """Let a process run to its end."""
    output = process.communicate(b"." * 2 * STEPS)[0]
    assert process.returncode == 0
    return output


def test_a_process_that_is_killed_at_random_moments_ends_with_the_same_bits(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert len(finish(start(whole, tmp_path / "cache"))) == STEPS
    rng = random.Random(int.from_bytes(os.urandom(4), "little"))
    for _ in range(4):
        process = start(killed, tmp_path / "cache")
        process.stdin.write(b"." * TURN)  # it gets no further than so many batches
        process.stdin.flush()
        process.stdout.read(rng.randint(3, TURN - 5))
        time.sleep(rng.uniform(0, 0.01))
        process.kill()
        process.communicate()
        assert process.returncode == -9
    finish(start(killed, tmp_path / "cache"))
    name = f"step-{STEPS:09d}.safetensors"
    assert (killed / name).read_bytes() == (whole / name).read_bytes()
    assert sorted(p.name for p in killed.iterdir()) == sorted(p.name for p in whole.iterdir())
