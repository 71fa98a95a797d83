"""Comparisons of a model's outputs with a teacher's: means over positions, masks, functions."""

import numpy as np
import pytest

import bitwright as bw
from bitwright.errors import TrainingError

MASK = np.array([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]])


def rows(shape, seed):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def encoder(seed, mask="i64[n, s]"):
    """hidden = tanh(x @ w) for tokens x [n, s, 4]; the mask is an input that it does not use."""
    b = bw.Builder("encoder")
    x = b.input("x", "f32[n, s, 4]")
    b.input("mask", mask)
    return b.build(hidden=b.tanh(b.matmul(x, b.parameter("w", rows((4, 5), seed)))))


def trainer_of(distillation, mask="i64[n, s]", **options):
    return bw.Trainer(
        encoder(0, mask),
        teacher=encoder(1, mask),
        distillation=distillation,
        optimizer=bw.SGD(lr=1.0),
        threads=1,
        **options,
    )


def loss_of(distillation, batch):
    return trainer_of(distillation).evaluate([batch])["loss"]


def hidden(seed, x):
    return np.tanh(x @ rows((4, 5), seed))


def cosine_loss(y, t):
    norms = np.linalg.norm(y, axis=-1) * np.linalg.norm(t, axis=-1)
    return 1 - ((y * t).sum(-1) / norms).mean()


def test_pooled_compares_masked_means():
    x = rows((3, 4, 4), 2)
    weights = MASK[..., None] / MASK.sum(1)[:, None, None]
    y, t = ((hidden(seed, x) * weights).sum(1) for seed in (0, 1))
    batch = {"x": x, "mask": MASK}
    assert np.isclose(loss_of(bw.train.Pooled("mask"), batch), cosine_loss(y, t), rtol=1e-5)
    wanted = {"mse": ((y - t) ** 2).mean(), "l1": np.abs(y - t).mean()}
    for name, value in wanted.items():
        assert np.isclose(loss_of(bw.train.Pooled("mask", name), batch), value, rtol=1e-5)


def test_pooled_without_a_mask_is_the_mean_over_positions():
    x = rows((3, 4, 4), 2)
    y, t = hidden(0, x).mean(1), hidden(1, x).mean(1)
    found = loss_of({"hidden": bw.train.Pooled()}, {"x": x, "mask": MASK})
    assert np.isclose(found, cosine_loss(y, t), rtol=1e-5)


def test_values_behind_the_mask_do_not_change_the_step():
    trained = []
    for noise in (0.0, 3.0):
        x = rows((3, 4, 4), 2) + np.float32(noise) * (1 - MASK[..., None]).astype(np.float32)
        trainer = trainer_of(bw.train.Pooled("mask", "mse"))
        trainer.fit([{"x": x, "mask": MASK}], steps=1, progress=False)
        trained.append(trainer.parameters()["w"])
    np.testing.assert_allclose(*trained, rtol=1e-5, atol=1e-6)


def test_a_row_without_positions_gives_a_finite_step():
    trainer = trainer_of(bw.train.Pooled("mask"))
    trainer.fit([{"x": rows((3, 4, 4), 2), "mask": np.zeros_like(MASK)}], steps=1, progress=False)
    assert np.isfinite(trainer.parameters()["w"]).all()


def relative(b, y, t):
    """A comparison of the test's own: squares of the error over squares of the target."""
    squares = [b.mul(v, v) for v in (b.sub(y, t), t)]
    return b.div(*(b.reduce_sum(v, axes=[0, 1, 2], keepdims=False) for v in squares))


def test_a_function_compares_and_a_run_with_it_resumes(tmp_path):
    x = rows((3, 4, 4), 2)
    y, t = hidden(0, x), hidden(1, x)
    batch = {"x": x, "mask": MASK}
    assert np.isclose(loss_of(relative, batch), ((y - t) ** 2).sum() / (t**2).sum(), rtol=1e-5)
    first, second = (trainer_of(relative, checkpoints=tmp_path) for _ in range(2))
    assert first.fingerprint() == second.fingerprint()
    first.fit([batch], steps=1, progress=False)
    second.fit([batch], steps=1, progress=False, resume=True)
    assert np.array_equal(first.parameters()["w"], second.parameters()["w"])
    assert trainer_of(bw.train.Pooled()).fingerprint() != first.fingerprint()


def test_wrong_comparisons_are_named():
    with pytest.raises(TrainingError, match="no comparison 'cosin'"):
        bw.train.Pooled(compare="cosin")
    with pytest.raises(TrainingError, match=r"no input 'masc'.*mask"):
        trainer_of(bw.train.Pooled("masc"))
    with pytest.raises(TrainingError, match=r"mask 'mask' does not fit the output.*2 axes"):
        trainer_of(bw.train.Pooled("mask"), mask="i64[n]")
    with pytest.raises(TrainingError, match="the loss is not one number"):
        trainer_of(lambda b, y, t: b.sub(y, t))
    b = bw.Builder("flat")
    flat = b.build(y=b.matmul(b.input("x", "f32[n, 4]"), b.parameter("w", rows((4, 5), 0))))
    with pytest.raises(TrainingError, match="no axis of positions"):
        bw.Trainer(flat, teacher=flat, distillation=bw.train.Pooled())
