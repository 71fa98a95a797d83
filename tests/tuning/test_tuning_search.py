"""bw.tune: answers, recipes, limits, resuming."""

import json

import numpy as np
import pytest

import bitwright as bw
from bitwright import demo
from bitwright.errors import BitwrightError, CalibrationError
from bitwright.ir.container import to_bytes
from bitwright.quant.model.quantize import Quantized
from bitwright.tuning.precision.metric import MaxDrop, agreement
from bitwright.tuning.precision.search import parse_budget
from bitwright.tuning.precision.trial import graph_of


def network(width=64, layers=3, seed=0):
    rng = np.random.default_rng(seed)
    b = bw.Builder("net")
    x = b.input("x", f"f32[batch, {width}]")
    for i in range(layers):
        w = rng.normal(0, width**-0.5, (width, width)).astype(np.float32)
        x = b.relu(b.matmul(x, b.constant(w, name=f"w{i}")))
    return b.build(y=x)


def batches(count=12, rows=32, width=64):
    rng = np.random.default_rng(1)
    return [{"x": rng.normal(size=(rows, width)).astype(np.float32)} for _ in range(count)]


KEYS = {"objective", "budget_s", "max_drop", "metric", "pareto", "layers", "recipe", "seconds",
        "stopped", "notes"}  # fmt: skip


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuned")
    found = bw.tune(network(), batches(), max_drop="2%", budget="60s", threads=1, workdir=folder)
    return found, folder


def test_the_result_is_within_the_drop_and_explained(tuned):
    found, folder = tuned
    facts = found.to_dict()
    assert set(facts) == KEYS and json.loads(json.dumps(facts)) == facts
    assert found.metric["best"] >= found.metric["float"] * 0.98
    assert sum(row["is_best"] for row in found.pareto) == 1
    assert {"float", "int8"} <= {row["name"] for row in found.pareto}
    assert [layer["value"] for layer in found.layers] == ["matmul", "matmul_1", "matmul_2"]
    for layer in found.layers:
        assert layer["precision"] in layer["options"] and layer["reason"]
        assert {"f32", "int8-static", "int8-dynamic"} <= set(layer["options"])
    best = found.best["latency_ms"]
    assert all(best <= row["latency_ms"] * 1.05 for row in found.pareto if row["name"] == "float")
    assert "precision" in str(found) and found.best["name"] in repr(found)
    assert json.loads((folder / "recipe.json").read_text()) == found.recipe
    assert to_bytes(bw.load(folder / "best.bw")) == to_bytes(found.graph)


def test_the_recipe_builds_the_same_model(tuned):
    found, _ = tuned
    if isinstance(found.model, Quantized):
        again = bw.quantize(network(), batches(), recipe=found.recipe, threads=1)
        assert to_bytes(again.graph) == to_bytes(found.graph)


@pytest.mark.parametrize(
    "precisions",
    [
        ("int8-static", "f32", "int8-dynamic"),
        ("w4", "int8-static", "f32"),
        ("w8", "w4", "f32"),
        ("bf16", "f32", "int8-static"),
        ("bf16", "bf16", "bf16"),
    ],
)
def test_every_assignment_is_a_recipe(tmp_path, precisions):
    """A built candidate has the precisions asked for, and its JSON file builds it again."""
    from bitwright.quant.model.stages import simplify
    from bitwright.tuning.precision.precisions import SCHEMES, recipe_of
    from bitwright.tuning.precision.units import find_units

    graph, data = network(), batches()
    units = find_units(simplify(graph))
    recipe = recipe_of(units, dict(zip([u.name for u in units], precisions, strict=True)))
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    made = bw.quantize(graph, data, recipe=tmp_path / "recipe.json", threads=1)
    schemes = [layer.scheme for layer in made.report.layers]
    assert schemes == [SCHEMES[name] for name in precisions]
    policy = made.graph.meta.get("onnx.meta.bitwright.precision", "")
    assert ("bf16" in policy) == ("bf16" in precisions)
    widths = {v.dtype.name for _, n in made.graph.walk() for v in n.outputs if n.op == "constant"}
    assert ("i4" in widths) == ("w4" in precisions)


def test_resuming_repeats_no_measurement(tmp_path):
    options = {"threads": 1, "workdir": tmp_path, "budget": "60s"}
    calls = []

    def score(run):
        calls.append(1)
        return agreement([{"y": np.zeros(1, np.float32)}], [{"y": np.zeros(1, np.float32)}])

    first = bw.tune(network(), batches(), score, **options)
    count, lines = len(calls), (tmp_path / "journal.jsonl").read_text().count('"trial"')
    again = bw.tune(network(), None, score, resume=True, **options)
    assert len(calls) == count
    assert (tmp_path / "journal.jsonl").read_text().count('"trial"') == lines
    assert again.recipe == first.recipe and to_bytes(again.graph) == to_bytes(first.graph)
    assert again.to_dict()["pareto"] == first.to_dict()["pareto"]


def test_an_impossible_drop_leaves_float():
    found = bw.tune(network(), batches(), max_drop=0.0, budget="30s", threads=1)
    assert isinstance(found.model, bw.Graph) and found.best["name"] == "float"
    assert any("float is the answer" in note for note in found.notes)


def test_a_model_without_products_stays_float():
    b = bw.Builder("plain")
    graph = b.build(y=b.relu(b.input("x", "f32[batch, 4]")))
    found = bw.tune(graph, batches(4, 8, 4), budget="30s", threads=1)
    assert found.graph == graph and not found.layers
    assert found.stopped == "no layer can have another precision"


def test_models_with_several_tables_are_tuned():
    rng = np.random.default_rng(4)
    b = bw.Builder("tables")
    ids = b.input("ids", "i64[batch, 16]")
    tables = [rng.normal(size=(200, 64)).astype(np.float32) for _ in range(3)]
    rows = [
        b.gather(b.constant(one, name=f"t{i}"), ids, axis=0, name=f"rows{i}")
        for i, one in enumerate(tables)
    ]
    x = b.add(b.add(rows[0], rows[1]), rows[2])
    w = rng.normal(0, 0.1, (64, 64)).astype(np.float32)
    graph = b.build(y=b.matmul(x, b.constant(w, name="w")))
    data = [{"ids": rng.integers(0, 200, (4, 16))} for _ in range(8)]
    found = bw.tune(graph, data, max_drop="2%", budget="60s", threads=1)
    assert found.stopped != "the budget is used up"
    assert {"rows0", "rows1", "rows2"} <= {layer["value"] for layer in found.layers}


def test_a_used_up_budget_still_has_an_answer():
    found = bw.tune(network(), batches(), budget=0.001, threads=1)
    assert found.stopped == "the budget is used up" and found.best["name"] == "float"


def test_an_interrupt_returns_the_best_so_far():
    def score(run):
        score.calls += 1
        if score.calls > 2:
            raise KeyboardInterrupt
        return 1.0

    score.calls = 0
    found = bw.tune(network(), batches(), score, budget="30s", threads=1, objective="size")
    assert found.stopped == "interrupted" and found.best["name"] in ("float", "int8")


def test_the_size_objective_takes_the_smallest_within_the_drop(monkeypatch):
    monkeypatch.setattr("bitwright.tuning.precision.session.SLOWER", 1e9)  # no wall time in a test
    found = bw.tune(network(), batches(), max_drop="50%", budget="60s", threads=1, objective="size")
    plain = next(row for row in found.pareto if row["name"] == "int8")
    assert found.best["bytes"] < plain["bytes"]
    assert "w4" in {layer["precision"] for layer in found.layers}


def test_on_best_gets_each_new_model():
    seen = []
    bw.tune(
        network(), batches(), budget="20s", threads=1,
        on_best=lambda model, trial: seen.append((trial.name, graph_of(model))),
    )  # fmt: skip
    assert seen[0][0] == "float" and all(isinstance(graph, bw.Graph) for _, graph in seen)


@pytest.mark.parametrize(
    "options, text",
    [
        ({"objective": "speed"}, "there is no objective 'speed'"),
        ({"max_drop": "a lot"}, "max_drop is not a loss of score"),
        ({"max_drop": -1}, "max_drop is not a loss of score"),
        ({"budget": "soon"}, "budget is not a time"),
        ({"resume": True}, "only a search with a workdir can continue"),
    ],
)
def test_wrong_options_are_named(options, text):
    with pytest.raises(BitwrightError, match=text):
        bw.tune(network(), batches(1), **options)


def test_no_data_is_an_error():
    with pytest.raises(CalibrationError, match="tuning needs data"):
        bw.tune(network())


def test_drops_and_budgets_have_units():
    assert MaxDrop.of("0.5%").allowed(-80.0) == pytest.approx(0.4)
    assert MaxDrop.of(0.01).allowed(5.0) == 0.01
    assert [parse_budget(b) for b in (90, "90s", "1.5m", "1h")] == [90, 90, 90, 3600]


def test_the_demo_model_keeps_its_accuracy(tmp_path):
    images, labels = demo.held_out()

    def accuracy(run):
        (logits,) = run(images).values()
        return float((logits.argmax(1) == labels).mean())

    found = bw.tune(
        demo.model_path(), demo.calibration(), accuracy, max_drop="0.5%", budget="30s", threads=1
    )
    assert found.metric["best"] >= found.metric["float"] * 0.995
    found.save(tmp_path / "tuned.onnx")
    assert accuracy(bw.compile(tmp_path / "tuned.onnx", threads=1).run) == found.metric["best"]
