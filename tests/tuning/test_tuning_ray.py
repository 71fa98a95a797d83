"""With Ray, the search makes the same decisions from the same recorded facts."""

import json

import numpy as np
import pytest

import bitwright as bw
from bitwright.errors import BitwrightError


def network():
    rng = np.random.default_rng(0)
    b = bw.Builder("net")
    x = b.input("x", "f32[batch, 48]")
    for i in range(3):
        w = rng.normal(0, 0.2, (48, 48)).astype(np.float32)
        x = b.relu(b.matmul(x, b.constant(w, name=f"w{i}")))
    return b.build(y=x)


def batches():
    rng = np.random.default_rng(1)
    return [{"x": rng.normal(size=(32, 48)).astype(np.float32)} for _ in range(12)]


def test_a_missing_ray_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(BitwrightError, match="needs Ray"):
        bw.tune(network(), batches(), ray=True)


@pytest.mark.slow
def test_the_assignment_is_the_same_with_ray(tmp_path):
    ray = pytest.importorskip("ray", reason="Ray is not installed (extra: ray)")
    options = {"max_drop": "0.05%", "threads": 1, "budget": "5m"}
    alone, spread = tmp_path / "alone", tmp_path / "spread"
    first = bw.tune(network(), batches(), workdir=alone, **options)
    spread.mkdir()
    (spread / "statistics.npz").write_bytes((alone / "statistics.npz").read_bytes())
    facts = ("problem", "timings", "predictions", "latency", "final")  # all times, no scores
    events = map(json.loads, (alone / "journal.jsonl").read_text().splitlines())
    kept = [json.dumps({**one, "elapsed": 0.0}) for one in events if one["event"] in facts]
    (spread / "journal.jsonl").write_text("".join(f"{line}\n" for line in kept))
    ray.init(num_cpus=2, log_to_driver=False)
    try:
        second = bw.tune(network(), None, workdir=spread, resume=True, ray=True, **options)
    finally:
        ray.shutdown()
    assert second.recipe == first.recipe
    assert [layer["precision"] for layer in second.layers] == [
        layer["precision"] for layer in first.layers
    ]


@pytest.mark.slow
def test_workers_compute_the_same_scores(tmp_path):
    ray = pytest.importorskip("ray", reason="Ray is not installed (extra: ray)")
    from bitwright.pipeline import compile_graph
    from bitwright.tuning.precision.metric import MaxDrop, Metric
    from bitwright.tuning.precision.problem import prepare_problem
    from bitwright.tuning.precision.ray_trials import RayScores
    from bitwright.tuning.precision.trial import ModelBuilder, graph_of

    problem = prepare_problem(
        network(), batches(), tmp_path, sample=None, transform=None, subset=None, threads=1,
        resume=False,
    )  # fmt: skip
    builder = ModelBuilder(problem.graph, problem.statistics, 1)
    metric = Metric(None, MaxDrop.of("1%"), problem.batches)
    metric.set_reference(compile_graph(problem.graph, threads=1).run)
    recipes = [{"base": "int8"}, {"base": "w4"}, {"base": "int8", "schemes": {"matmul": "float"}}]
    ray.init(num_cpus=2, log_to_driver=False)
    try:
        scores = RayScores(builder, metric)
        scores.compute(recipes)
    finally:
        ray.shutdown()
    for recipe in recipes:
        exe = compile_graph(graph_of(builder.build(recipe)), threads=1)
        assert scores.known(recipe) == {
            "score": metric.score(exe.run), "error": metric.error(exe.run)
        }  # fmt: skip
