"""Losses and their gradients against PyTorch, at points where formulas break down."""

import numpy as np
import pytest

import bitwright as bw
from bitwright.errors import TrainingError

torch = pytest.importorskip("torch")
nnf = torch.nn.functional


def rows(shape=(6, 5), seed=0, scale=1.0):
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)


def loss_and_gradient(kind, y, labels, **options):
    """The loss of outputs that are a parameter, and its gradient (from one step with rate 1)."""
    b = bw.Builder("outputs")
    x = b.input("x", "f32[]")
    graph = b.build(y=b.add(b.parameter("y", y), x))
    trainer = bw.Trainer(graph, loss=kind, optimizer=bw.SGD(lr=1.0), threads=1, **options)
    batch = {"x": np.float32(0)} | ({} if labels is None else {"labels": labels})
    loss = trainer.fit([batch], steps=1).loss
    return loss, y - trainer.parameters()["y"]


def expected(function, y, *rest):
    leaf = torch.tensor(y, requires_grad=True)
    loss = function(leaf, *map(torch.tensor, rest))
    loss.backward()
    return loss.item(), leaf.grad.numpy()


def check(kind, function, y, labels):
    found = loss_and_gradient(kind, y, labels)
    wanted = expected(function, y, labels)
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(found[1], wanted[1], rtol=1e-4, atol=1e-6)


LABELS = np.array([0, 1, 2, 3, 4, 0])
IMAGE_LABELS = np.random.default_rng(3).integers(0, 5, (2, 3, 4))
PADDED = np.array([[0, -100, 2], [4, 1, -100]])


def test_cross_entropy():
    check("cross_entropy", nnf.cross_entropy, rows(), LABELS)
    check("cross_entropy", nnf.cross_entropy, rows(scale=100.0), LABELS)
    check("cross_entropy", nnf.cross_entropy, rows((2, 5, 3, 4)), IMAGE_LABELS)


def test_token_cross_entropy_leaves_out_padding():
    def by_token(y, labels):
        return nnf.cross_entropy(y.reshape(-1, 5), labels.reshape(-1))

    check("token_cross_entropy", by_token, rows((2, 3, 5)), PADDED)


def test_binary_cross_entropy_at_zero_and_at_large_logits():
    y = rows()
    y[0] = [0, 0, 50, -50, 12]
    targets = np.random.default_rng(1).uniform(0, 1, y.shape).astype(np.float32)
    targets[0] = [1, 0, 1, 1, 1]
    check("binary_cross_entropy", nnf.binary_cross_entropy_with_logits, y, targets)


def test_distances():
    check("mse", nnf.mse_loss, rows(), rows(seed=1))
    check("l1", nnf.l1_loss, rows(), rows(seed=1))


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e3])
def test_cosine_of_short_and_long_rows(scale):
    y, targets = rows(scale=scale), rows(seed=1, scale=scale)
    loss, gradient = loss_and_gradient("cosine", y, targets)
    wanted = expected(lambda a, t: 1 - nnf.cosine_similarity(a, t).mean(), y, targets)
    np.testing.assert_allclose(loss, wanted[0], rtol=1e-5)
    # the step rounds the gradient to the spacing of y
    np.testing.assert_allclose(gradient, wanted[1], rtol=1e-3, atol=1e-6 * max(1, scale))


def test_cosine_of_a_row_of_zeros_is_finite():
    y = rows()
    y[2] = 0
    loss, gradient = loss_and_gradient("cosine", y, rows(seed=1))
    assert np.isfinite(loss) and np.isfinite(gradient).all()


def dense(seed):
    b = bw.Builder("dense")
    x = b.input("x", "f32[n, 4]")
    return b.build(logits=b.matmul(x, b.parameter("w", rows((4, 5), seed))))


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_distillation_beside_labels(temperature):
    x = rows((6, 4), seed=9)
    trainer = bw.Trainer(
        dense(0),
        loss="cross_entropy",
        teacher=dense(1),
        temperature=temperature,
        distillation_weight=0.25,
        optimizer=bw.SGD(lr=1.0),
        threads=1,
    )
    loss = trainer.fit([{"x": x, "labels": LABELS}], steps=1).loss
    gradient = rows((4, 5), 0) - trainer.parameters()["w"]
    t = (torch.tensor(x @ rows((4, 5), 1)) / temperature).log_softmax(1)

    def both(w):
        y = torch.tensor(x) @ w
        soft = (y / temperature).log_softmax(1)
        divergence = nnf.kl_div(soft, t, reduction="batchmean", log_target=True)
        hard = nnf.cross_entropy(y, torch.tensor(LABELS))
        return hard + 0.25 * temperature**2 * divergence

    wanted = expected(both, rows((4, 5), 0))
    np.testing.assert_allclose(loss, wanted[0], rtol=1e-5)
    np.testing.assert_allclose(gradient, wanted[1], rtol=1e-4, atol=1e-6)


def test_labels_that_are_no_class_are_named():
    for label in (5, -1, -100, 2**40):
        labels = LABELS.copy()
        labels[3] = label
        with pytest.raises(TrainingError, match=f"not a class; expected 0 to 4, found {label}"):
            loss_and_gradient("cross_entropy", rows(), labels)
