"""Optimizers against torch.optim over 20 steps, and their groups by name."""

import numpy as np
import pytest
from training_models import batches, mlp, torch_mlp

import bitwright as bw
from bitwright.errors import NonFiniteError, TrainingError

torch = pytest.importorskip("torch")
CASES = [
    (bw.SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    (
        bw.SGD(lr=0.05, momentum=0.9, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    ),
    (
        bw.SGD(lr=0.05, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    ),
    (bw.Adam(lr=0.01), lambda p: torch.optim.Adam(p, lr=0.01)),
    (
        bw.Adam(lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, 0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
    ),
    (
        bw.AdamW(lr=0.01, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    ),
]


class TorchLion:
    """Lion as its paper gives it."""

    def __init__(self, params, lr, betas, weight_decay):
        self.params, self.lr, self.betas, self.decay = params, lr, betas, weight_decay
        self.moments = [torch.zeros_like(p) for p in params]

    def zero_grad(self):
        for p in self.params:
            p.grad = None

    def step(self):
        first, second = self.betas
        with torch.no_grad():
            for p, m in zip(self.params, self.moments, strict=True):
                p.mul_(1 - self.lr * self.decay)
                p.sub_(self.lr * torch.sign(first * m + (1 - first) * p.grad))
                m.mul_(second).add_(p.grad, alpha=1 - second)


CASES.append(
    (
        bw.Lion(lr=1e-3, weight_decay=0.1),
        lambda p: TorchLion(p, 1e-3, (0.9, 0.99), 0.1),
    )
)


def train_in_torch(graph, make, data, clip=None, schedule=None):
    """Losses and final weights of the same run in PyTorch."""
    p, logits = torch_mlp(graph)
    optimizer = make(list(p.values()))
    losses = []
    for number, batch in enumerate(data):
        if schedule is not None:
            for group in optimizer.param_groups:
                group["lr"] = schedule(number)
        loss = torch.nn.functional.cross_entropy(logits(batch["x"]), torch.tensor(batch["labels"]))
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(list(p.values()), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.detach().numpy() for name, value in p.items()}


def require_equal(trainer, losses, expected_losses, expected, tolerance=1e-5):
    np.testing.assert_allclose(losses, expected_losses, rtol=tolerance)
    for name, array in trainer.parameters().items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(("ours", "theirs"), CASES, ids=[repr(ours) for ours, _ in CASES])
def test_optimizers_agree_with_torch_over_20_steps(ours, theirs):
    graph, data = mlp(), batches(20)
    trainer = bw.Trainer(graph, loss="cross_entropy", optimizer=ours)
    history = trainer.fit(data, epochs=1)
    require_equal(trainer, history.losses, *train_in_torch(graph, theirs, data))


def test_clipping_and_schedules_agree_with_torch():
    graph, data = mlp(), batches(20)
    schedule = bw.train.warmup(5) * bw.train.cosine(20)
    trainer = bw.Trainer(
        graph, loss="cross_entropy", optimizer=bw.SGD(lr=0.5), clip=0.3, schedule=schedule
    )
    history = trainer.fit(data, epochs=1)
    expected = train_in_torch(
        graph, lambda p: torch.optim.SGD(p, lr=0.5), data, 0.3, lambda n: 0.5 * schedule(n)
    )
    require_equal(trainer, history.losses, *expected)


def test_groups_have_weight_decays_and_rates_of_their_own():
    graph, data = mlp(), batches(10)
    trainer = bw.Trainer(
        graph,
        loss="cross_entropy",
        optimizer=bw.AdamW(lr=0.01, weight_decay=0.5),
        decay={"b*": 0},
        rates={"w2": 3.0},
        freeze=["b1"],
    )
    history = trainer.fit(data, epochs=1)

    def groups(values):
        w1, _, w2, b2 = values
        return torch.optim.AdamW(
            [
                {"params": [w1]},
                {"params": [w2], "lr": 0.03},
                {"params": [b2], "weight_decay": 0.0},
            ],
            lr=0.01,
            weight_decay=0.5,
        )

    losses, expected = train_in_torch(graph, groups, data)
    require_equal(trainer, history.losses, losses, expected)
    before = {v.name: v.node.attrs["value"] for v in graph.parameters}
    np.testing.assert_array_equal(bw_value(trainer.graph(), "b1"), before["b1"])


def bw_value(graph, name):
    return graph.value(name).node.attrs["value"]


def test_settings_out_of_range_are_named():
    with pytest.raises(TrainingError, match="learning rate is out of range"):
        bw.SGD(lr=-1)
    with pytest.raises(TrainingError, match="Nesterov momentum needs momentum > 0"):
        bw.SGD(nesterov=True)
    with pytest.raises(TrainingError, match="beta is out of range"):
        bw.Adam(betas=(1.0, 0.9))
    with pytest.raises(TrainingError, match=r"this is not an optimizer; expected bw\.SGD"):
        bw.Trainer(mlp(), loss="cross_entropy", optimizer="adagrad")
    with pytest.raises(TrainingError, match=r"pattern 'w3' of decay matches no parameter"):
        bw.Trainer(mlp(), loss="cross_entropy", decay={"w3": 0})


UPDATES = {
    "sgd_update": (0, ["rate", "factor"], False),
    "adam_update": (2, ["rate", "step", "root", "factor"], True),
    "lion_update": (1, ["rate", "factor"], True),
}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("op", UPDATES)
def test_a_gradient_that_is_not_finite_is_an_error_and_changes_nothing(op, bad):
    moments, scalars, is_before = UPDATES[op]
    b = bw.Builder("update")
    state = b.state("w", np.ones((3, 1001), np.float32))
    held = [b.state(f"m{n}", np.ones((3, 1001), np.float32)) for n in range(moments)]
    given = [b.input(name, "f32[]") for name in scalars]
    apply, grad = b.input("apply", "bool[]"), b.input("grad", "f32[3, 1001]")
    rest = [*held, *given, apply] if is_before else [*given, apply, *held]
    new = b.op(op, state, grad, *rest, require_finite=True)
    for old, value in zip([state, *held], new if isinstance(new, tuple) else (new,), strict=True):
        b.update(old, value)
    graph = b.build()
    feeds = {name: np.float32(0.5) for name in scalars}
    gradient = np.full((3, 1001), 0.25, np.float32)
    for target in ("cpu", "reference"):
        exe = bw.compile(graph, target=target, threads=2)
        exe.run({**feeds, "apply": np.array(True), "grad": gradient})
        worse = gradient.copy()
        worse[2, 1000] = bad  # in the last, partial vector
        before = {name: array.copy() for name, array in exe.engine.states.items()}
        exe.run({**feeds, "apply": np.array(False), "grad": worse})
        assert all(np.array_equal(exe.engine.states[name], a) for name, a in before.items())
        with pytest.raises(NonFiniteError, match=r"the gradient( of 'w')? is not finite"):
            exe.run({**feeds, "apply": np.array(True), "grad": worse})
        after = exe.engine.states
        assert all(after[name][2, 1000] == array[2, 1000] for name, array in before.items())
        exe.run({**feeds, "apply": np.array(True), "grad": gradient})  # the fault is cleared
