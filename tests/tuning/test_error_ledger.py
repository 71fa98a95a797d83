"""The error ledger: causes, sums, fixes, changed answers, and models of other forms."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

import bitwright as bw
from bitwright.tuning.attribution import attribute, predict_errors, prepared

RNG = np.random.default_rng(5)
SIZES = (16, 24, 24, 6)
WEIGHTS = [(RNG.normal(size=(a, b)) / np.sqrt(a)).astype(np.float32) for a, b in pairwise(SIZES)]
BIASES = [(RNG.normal(size=b) * 0.1).astype(np.float32) for b in SIZES[1:]]
DATA = [{"x": RNG.normal(size=(8, 16)).astype(np.float32)} for _ in range(6)]
NEW_DATA = [{"x": RNG.normal(size=(8, 16)).astype(np.float32)} for _ in range(4)]
DAMAGED = "fc1"


def model(quantized=False, *, coarse=0, wide=1.0, offset=0.0):
    """Three layers; the second one is damaged: coarse weights, another range, a shifted bias."""
    b = bw.Builder("three")
    x = b.input("x", "f32[n, 16]")
    for number, (w, bias) in enumerate(zip(WEIGHTS, BIASES, strict=True)):
        name = f"fc{number}"
        is_damaged = quantized and name == DAMAGED
        weight = b.constant(w)
        if quantized:
            low, high = (-4.0, 4.0) if number == 0 else (0.0, 5.0)
            high, low = high * (wide if is_damaged else 1), low * (wide if is_damaged else 1)
            scale = np.float32((high - low) / 255)
            zero = np.uint8(round(-low / scale))
            x = b.dequantize(b.quantize(x, scale, zero, to="u8"), scale, zero)
            scales = (np.abs(w).max(0) / 127).astype(np.float32)
            rounded = np.round(w / scales)
            if is_damaged and coarse:
                rounded = np.clip(np.round(rounded / coarse) * coarse, -127, 127)
            weight = b.dequantize(b.constant(rounded.astype(np.int8)), b.constant(scales), axis=1)
            bias = bias + np.float32(offset if is_damaged else 0)
        y = b.matmul(x, weight, name=name)
        x = b.add(y, b.constant(bias), name=f"{name}.biased")
        if number < 2:
            x = b.relu(x, name=f"relu{number}")
    return b.build(logits=x)


def check_sum(ledger):
    total = sum(line.share for line in ledger.lines) + ledger.rest
    assert total == pytest.approx(ledger.error_energy, rel=1e-9)
    assert abs(ledger.rest) < 0.2 * ledger.error_energy


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        ({"coarse": 40}, "weight rounding"),
        ({"wide": 20.0}, "activation rounding"),
        ({"wide": 0.25}, "clipping"),
        ({"offset": 0.5}, "bias shift"),
    ],
)
def test_the_damaged_layer_and_its_cause_come_first(damage, cause):
    made = bw.ledger(
        model(True, **damage), NEW_DATA, float_model=model(), calibration=DATA, fixes=1, threads=1
    )
    check_sum(made)
    first = made.lines[0]
    assert (first.value, first.cause) == (DAMAGED, cause)
    assert first.share > 0.5 * made.error_energy
    assert first.predicted_sqnr_db > made.sqnr_db + 3
    assert first.fix.sqnr_db > made.sqnr_db + 3
    assert first.fix.bytes is not None and first.fix.seconds is not None
    assert first.fix.text in str(made)


def outliers(quantized=False):
    """A product whose input has a channel 60 times as large as the others."""
    draw = np.random.default_rng(3)
    w = draw.normal(size=(64, 32)).astype(np.float32)
    w[5] /= 60
    b = bw.Builder("outliers")
    x = b.input("x", "f32[n, 64]")
    if quantized:
        scale, zero = np.float32(2 * 250 / 255), np.uint8(128)
        x = b.dequantize(b.quantize(x, scale, zero, to="u8"), scale, zero)
        scales = (np.abs(w).max(0) / 127).astype(np.float32)
        rounded = np.round(w / scales).astype(np.int8)
        w = b.dequantize(b.constant(rounded), b.constant(scales), axis=1)
    else:
        w = b.constant(w)
    graph = b.build(y=b.matmul(x, w, name="fc"))
    factors = np.where(np.arange(64) == 5, 60, 1).astype(np.float32)
    return graph, [{"x": draw.normal(size=(20, 64)).astype(np.float32) * factors} for _ in range(4)]


def test_smoothing_and_finer_granularity_are_measured():
    made = bw.ledger(
        outliers(True)[0], outliers()[1], float_model=outliers()[0], fixes=2, threads=1
    )
    line = next(line for line in made.lines if line.cause == "activation rounding")
    found = {fix.action: fix for fix in [line.fix, *line.alternatives]}
    assert set(found) == {"float_activations", "per_token", "smoothing", "restore_float"}
    assert found["smoothing"].sqnr_db > found["per_token"].sqnr_db > made.sqnr_db
    assert found["smoothing"].sqnr_db > made.sqnr_db + 10
    assert all(fix.seconds is not None and fix.bytes is not None for fix in found.values())
    gain = made.error_energy - min(fix.error for fix in found.values())
    assert made.error_energy - line.fix.error >= 0.5 * gain
    assert "also measured for fc, activation rounding: " in str(made)


def test_finer_weights_restore_what_coarse_weights_lost():
    made = bw.ledger(model(True, coarse=40), NEW_DATA, float_model=model(), fixes=1, threads=1)
    found = {fix.action: fix for fix in [made.lines[0].fix, *made.lines[0].alternatives]}
    assert set(found) == {"restore_float", "finer_weights"}
    assert found["finer_weights"].sqnr_db > made.sqnr_db + 10
    assert found["finer_weights"].bytes < found["restore_float"].bytes


def test_values_outside_the_calibrated_range_are_a_range_shift():
    loud = [{"x": 3 * batch["x"]} for batch in NEW_DATA]
    made = bw.ledger(model(True), loud, float_model=model(), calibration=DATA, fixes=0, threads=1)
    assert {line.cause for line in made.lines[:2]} == {"range shift"}
    check_sum(made)
    without = bw.ledger(model(True), loud, float_model=model(), fixes=0, threads=1)
    assert without.lines[0].cause == "clipping"  # calibration's ranges are unknown


def test_leave_one_out_is_what_removing_a_layer_gives():
    quantized = model(True, coarse=40)
    found = attribute(prepared(model()), quantized, NEW_DATA, probes=16, threads=1)
    half = model(True)  # the damaged layer as good as the others
    after = attribute(prepared(model()), half, NEW_DATA, threads=1)
    lost = found.layers[DAMAGED].left_out - after.layers[DAMAGED].left_out
    assert lost == pytest.approx(found.error - after.error, rel=0.25)


def test_changed_answers():
    quantized = model(True, coarse=100)
    made = bw.ledger(quantized, NEW_DATA, float_model=model(), fixes=0, threads=1)
    run, run_q = (bw.compile(g, threads=1) for g in (model(), quantized))
    expected = {}
    for number, batch in enumerate(NEW_DATA):
        a, b = (exe.run(batch)["logits"] for exe in (run, run_q))
        for row in np.flatnonzero(a.argmax(1) != b.argmax(1)):
            expected[number, int(row)] = int(a[row].argmax()), int(b[row].argmax())
    assert expected and made.flip_count == len(expected) and made.rows == 32
    assert {(f.batch, f.row): (f.float, f.quantized) for f in made.flips} == expected
    margins = [flip.float_margin for flip in made.flips]
    assert margins == sorted(margins, reverse=True)
    assert all(flip.quantized_margin > 0 for flip in made.flips)


def test_metric_is_predicted_and_measured():
    def closeness(run):
        outputs = [run(batch)["logits"] for batch in NEW_DATA]
        return {"size": sum(float(np.square(y).mean()) for y in outputs), "other": 0.0}

    made = bw.ledger(
        model(True, offset=0.5), NEW_DATA, closeness, float_model=model(), fixes=1, threads=1
    )
    assert made.metric["name"] == "size"
    first = made.lines[0]
    gap = made.metric["float"] - made.metric["quantized"]
    assert first.fix.metric == pytest.approx(gap, rel=0.3)
    assert first.predicted_metric == pytest.approx(made.metric["float"], rel=0.1)
    assert "size without it" in str(made)


def test_json_has_the_documented_keys(tmp_path):
    made = bw.ledger(model(True), NEW_DATA, float_model=model(), fixes=1, threads=1)
    made.save(tmp_path / "ledger.json")
    facts = json.loads((tmp_path / "ledger.json").read_text())
    keys = (
        "outputs signal_energy error_energy sqnr_db lines rest flips flip_count rows metric notes"
    )
    assert set(keys.split()) <= facts.keys()
    line = "layer value op scheme cause share leave_one_out predicted_sqnr_db predicted_metric fix"
    line += " alternatives"
    assert set(line.split()) == facts["lines"][0].keys()
    assert {"action", "text", "bytes", "seconds", "metric"} <= facts["lines"][0]["fix"].keys()
    assert facts["outputs"]["logits"]["sqnr_db"] == pytest.approx(made.sqnr_db)


def small_convnet():
    b = bw.Builder("net")
    x = b.input("x", "f32[n, 3, 10, 10]")
    w = [RNG.normal(size=s).astype(np.float32) / 4 for s in ((8, 3, 3, 3), (8, 8, 1, 1), (8, 5))]
    y = b.relu(b.conv(x, w[0], pads=(1, 1, 1, 1), name="first"))
    y = b.relu(b.conv(y, w[1], np.zeros(8, np.float32), name="second"))
    pooled = b.reduce_mean(y, axes=[2, 3], keepdims=False)
    logits = b.matmul(pooled, w[2], name="last")
    return b.build(logits=logits, features=pooled, answer=b.argmax(logits, axis=1, keepdims=False))


def test_a_quantized_model_knows_its_float_model_also_as_a_file(tmp_path):
    graph = small_convnet()
    images = [{"x": RNG.normal(size=(2, 3, 10, 10)).astype(np.float32)} for _ in range(8)]
    quantized = bw.quantize(graph, images, threads=1)
    assert quantized.source is not None
    made = bw.ledger(quantized, images[:3], fixes=1, threads=1)
    check_sum(made)
    assert set(made.outputs) == {"logits", "features"}
    assert {line.value for line in made.lines} <= {"first", "second", "last"}
    assert made.rows == 3 * 2 * 3  # an answer per row of two outputs, and the integer output
    quantized.save(tmp_path / "q.onnx")
    graph.save(tmp_path / "f.onnx")
    again = bw.ledger(
        tmp_path / "q.onnx", images[:3], float_model=tmp_path / "f.onnx", fixes=0, threads=1
    )
    assert again.error_energy == pytest.approx(made.error_energy, rel=0.05)
    assert set(again.layers) == {"first", "second", "logits"}  # a file names results by outputs
    check_sum(again)
    predicted = predict_errors(quantized.source, {"int8": quantized}, images[:2], threads=1)
    assert predicted["int8"].keys() == made.layers.keys()
    with pytest.raises(bw.BitwrightError, match="float model"):
        bw.ledger(replace(quantized, source=None), images)


def test_recurrent_layers_and_bodies_of_branches():
    b = bw.Builder("net")
    x, flag = b.input("x", "f32[5, n, 8]"), b.input("flag", "bool[]")
    w = RNG.normal(size=(1, 64, 8)).astype(np.float32) / 4
    r = RNG.normal(size=(1, 64, 16)).astype(np.float32) / 4
    y, *_ = b.lstm(x, w, r, outputs=["states", "last", "cell"])
    y = b.reshape(y, shape=(5, x.shape[1], 16))
    y = b.matmul(y, RNG.normal(size=(16, 64)).astype(np.float32), name="head")
    graph = b.build(y=y, flag_back=flag)
    batches = [
        {"x": RNG.normal(size=(5, 2, 8)).astype(np.float32), "flag": np.array(True)}
        for _ in range(6)
    ]
    made = bw.ledger(bw.quantize(graph, batches, threads=1), batches[:2], fixes=0, threads=1)
    assert {"states", "head"} & set(made.layers)
    check_sum(made)


def test_without_gradients_each_layer_is_measured():
    b = bw.Builder("net")
    x = b.input("x", "f32[n, 16]")
    y = b.matmul(x, WEIGHTS[0], name="fc0")
    y = b.matmul(b.hardmax(y), WEIGHTS[1], name="fc1")
    graph = b.build(y=y)
    made = bw.ledger(bw.quantize(graph, DATA, threads=1), NEW_DATA, fixes=0, threads=1)
    assert {line.cause for line in made.lines} == {"all causes"}
    assert "fc1" in {line.value for line in made.lines}
    assert any("gradient" in note for note in made.notes)


def test_nothing_quantized_and_bad_arguments():
    b = bw.Builder("plain")
    graph = b.build(y=b.relu(b.input("x", "f32[n, 16]"), name="y"))
    made = bw.ledger(graph, NEW_DATA, float_model=graph, threads=1)
    assert made.lines == [] and made.error_energy == 0 and made.rest == 0
    assert made.to_dict()["sqnr_db"] is None and "exact" in str(made)
    assert made.notes == ["no layer of the quantized model differs from the float model"]
    with pytest.raises(bw.BitwrightError, match="float_model"):
        bw.ledger(graph, NEW_DATA)
    with pytest.raises(bw.BitwrightError, match="empty"):
        bw.ledger(graph, [], float_model=graph)
    other = bw.Builder("other")
    different = other.build(y=other.relu(other.input("z", "f32[n, 16]")))
    with pytest.raises(bw.BitwrightError, match="other inputs"):
        bw.ledger(graph, NEW_DATA, float_model=different)


def test_command_line(tmp_path):
    from click.testing import CliRunner

    from bitwright.cli import main

    model(True, offset=0.5).save(tmp_path / "q.bw")
    model().save(tmp_path / "f.bw")
    (tmp_path / "data").mkdir()
    for number, batch in enumerate(NEW_DATA):
        np.savez(tmp_path / "data" / f"{number}.npz", **batch)
    script = tmp_path / "score.py"
    script.write_text("def score(run):\n    return 1.0\n")
    arguments = [
        *("ledger", str(tmp_path / "q.bw"), "--float", str(tmp_path / "f.bw")),
        *("--data", str(tmp_path / "data"), "--eval", f"{script}:score", "--threads", "1"),
        *("--fixes", "1", "--json", str(tmp_path / "out.json")),
    ]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert "bias shift" in result.output and "changed answers" in result.output
    assert json.loads((tmp_path / "out.json").read_text())["metric"]["name"] == "score"
