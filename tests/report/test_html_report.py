"""The data of the HTML report, its file, and the commands that write it."""

import json
import re

import numpy as np
import pytest
from click.testing import CliRunner
from report_sections import LEDGER, TUNE

import bitwright as bw
from bitwright import demo
from bitwright.cli import main
from bitwright.report.html import conclusions
from bitwright.report.html.data import ReportData, plain
from bitwright.report.html.page import embed, render


@pytest.fixture(scope="module")
def quantized():
    return bw.quantize(demo.model_path(), data=demo.calibration(), threads=2)


@pytest.fixture(scope="module")
def folder(quantized, tmp_path_factory):
    made = tmp_path_factory.mktemp("report")
    quantized.save(made / "digits-int8.onnx")
    data = made / "data"
    data.mkdir()
    images = demo.held_out()[0]["image"]
    for number in range(3):
        np.savez(data / f"{number}.npz", image=images[8 * number : 8 * number + 8])
    return made


@pytest.fixture(scope="module")
def whole(quantized, folder):
    """A report with every section."""
    return bw.write_report(
        folder / "whole.html",
        quantized,
        float_model=demo.model_path(),
        data=str(folder / "data"),
        latency=True,
        threads=2,
        ledger=LEDGER,
        tune=TUNE,
        scores={"float": {"accuracy": 0.99}, "quantized": {"accuracy": 0.97}},
        files=(demo.model_path(), folder / "digits-int8.onnx"),
        command="bitwright quantize digits.onnx",
    )


def test_a_measured_ledger_is_shown(quantized, folder):
    found = bw.ledger(quantized, str(folder / "data"), fixes=0, threads=2)
    made = bw.write_report(folder / "ledger.html", quantized, ledger=found.to_dict())
    assert made.ledger["lines"][0]["layer"] == found.lines[0].layer
    assert "Ledger" in (folder / "ledger.html").read_text(encoding="utf-8")


def test_quantization_hands_over_histograms_and_ranges(quantized):
    report = quantized.report
    assert {layer.value for layer in report.layers} == report.details.keys()
    for layer in report.layers:
        detail = report.details[layer.value]
        assert len(detail.values.counts) <= 64 and sum(detail.values.counts) > 0
        assert len(detail.weights.counts) <= 64
        if layer.scheme == "static":
            low, high = detail.range
            assert low <= 0 < high
            assert (high - low) / detail.scale == pytest.approx(255)
    assert "details" not in report.to_json()


def test_summary_has_figures_before_and_after(whole):
    summary = whole.summary
    assert summary["size"]["before"] > 2 * summary["size"]["after"]
    assert summary["latency"]["before"]["median_ms"] > 0
    assert summary["memory"]["after"] < summary["memory"]["before"]
    assert summary["scores"] == [{"name": "accuracy", "before": 0.99, "after": 0.97}]
    assert "smaller" in whole.headline and "accuracy 0.99 → 0.97" in whole.headline
    assert "fell by 2.0%" in whole.next_steps[0]["text"]


def test_layers_have_nodes_times_and_errors(whole):
    for row in whole.layers:
        node = whole.graph["nodes"][row["node"]]
        assert whole.layers[node["layers"][0]] is row
        assert row["seconds"] > 0
    assert {row["share"] for row in whole.layers if row["name"] in ("widen", "stem")} == {0.41, 0.2}
    timed = sum(node["seconds"] or 0 for node in whole.graph["nodes"])
    assert 0 < timed < 1


def test_worst_inputs_are_numbers_only(whole):
    assert [set(row) for row in whole.worst_inputs] == [
        {"batch", "sqnr_db", "cosine", "max_error", "largest", "same_top1", "nonfinite", "values"}
    ] * 3


def test_files_are_written_and_the_json_is_read_back(whole, folder):
    page = (folder / "whole.html").read_text(encoding="utf-8")
    found = json.loads((folder / "whole.json").read_text(encoding="utf-8"))
    assert found == whole.to_json()
    assert ReportData.from_json(found).to_json() == found
    assert len(page) < 300_000
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", page)


def test_embedded_data_cannot_end_its_element():
    text = "</script><script>alert(1)</script><!-- & \u2028"
    found = embed({"title": text})
    assert "<" not in found and ">" not in found and "&" not in found
    assert json.loads(found)["title"] == text
    page = render(ReportData(text).to_json())
    assert page.count("<script") == 2 and "alert(1)</script>" not in page


def test_numbers_that_are_not_finite_become_null():
    found = plain({"a": np.float32("nan"), 1: (np.inf, np.int64(3)), "b": np.array([1.5])})
    assert found == {"a": None, "1": [None, 3], "b": [1.5]}


def test_a_model_file_alone_gives_layers_with_ranges(folder):
    found = bw.write_report(folder / "alone.html", folder / "digits-int8.onnx")
    assert {row["scheme"] for row in found.layers} == {"static", "dynamic_per_token"}
    for row in found.layers:
        assert (row["detail"]["range"] is not None) == (row["scheme"] == "static")
        assert row["detail"]["weights"]["counts"]
    assert found.summary.get("size") is None


def test_names_and_histograms_come_from_the_float_model_and_the_data(folder):
    found = bw.write_report(
        folder / "named.html",
        folder / "digits-int8.onnx",
        float_model=demo.model_path(),
        data=str(folder / "data"),
        include_inputs=True,
    )
    assert "block1.conv1" in {row["name"] for row in found.layers}
    assert all(row["detail"]["values"]["counts"] for row in found.layers[1:])
    errors = [row["accumulated"]["sqnr_db"] for row in found.layers if row["accumulated"]]
    assert len(errors) >= 5 and min(errors) > 10  # equalization renames the others
    assert len(found.worst_inputs[0]["inputs"]["image"]["first"]) == 64


def test_a_model_without_layers(tmp_path):
    b = bw.Builder("relu")
    graph = b.build(y=b.relu(b.input("x", "f32[batch, 3]")))
    found = bw.write_report(tmp_path / "r.html", graph, latency=True, sizes={"batch": 2})
    assert found.layers == [] and found.graph["nodes"][0]["kind"] == "input"
    assert found.summary["latency"]["after"]["median_ms"] > 0
    assert found.headline.startswith("relu takes ")


def test_two_equal_models_without_weights(tmp_path):
    b = bw.Builder("relu")
    graph = b.build(y=b.relu(b.input("x", "f32[2]")))
    data = iter([{"x": np.ones(2, np.float32)}] * 2)
    found = bw.write_report(tmp_path / "r.html", graph, float_model=graph, data=data)
    assert "size" not in found.summary and len(found.worst_inputs) == 2
    read = json.loads((tmp_path / "r.json").read_text())
    assert read["worst_inputs"][0]["sqnr_db"] is None


def test_a_branch_is_one_box(tmp_path):
    b = bw.Builder("branch")
    x, flag = b.input("x", "f32[2, 2]"), b.input("flag", "bool[]")
    bodies = []
    for name in ("then", "other"):
        inner = bw.Builder(name)
        value = inner.input("v", "f32[2, 2]")
        bodies.append(inner.build(y=inner.matmul(value, np.eye(2, dtype=np.float32))))
    y = b.op("if", flag, x, **{"then": bodies[0], "else": bodies[1]})
    found = bw.write_report(tmp_path / "r.html", b.build(y=y))
    assert [node["op"] for node in found.graph["nodes"]][-2:] == ["if", "output"]


def test_the_file_must_be_html(tmp_path, quantized):
    with pytest.raises(bw.BitwrightError, match=r"does not end in \.html"):
        bw.write_report(tmp_path / "report.pdf", quantized)


@pytest.mark.parametrize("ledger", [{"lines": 3}, {"lines": [3]}, {"flips": "no"}])
def test_a_section_without_rows_is_refused(tmp_path, quantized, ledger):
    with pytest.raises(bw.BitwrightError, match="of the ledger has no rows"):
        bw.write_report(tmp_path / "r.html", quantized, ledger=ledger)


def test_a_latency_that_cannot_be_measured_is_a_note(tmp_path):
    b = bw.Builder("text")
    graph = b.build(y=b.identity(b.input("x", "string[2]")))
    found = bw.write_report(tmp_path / "r.html", graph, latency=True)
    assert "the latency was not measured: cannot make a random" in found.notes[0]


def test_next_steps_name_what_is_unknown():
    steps = conclusions.next_steps(ReportData("m"))
    assert {step["kind"] for step in steps} == {"check"}
    assert any("No score was measured" in step["text"] for step in steps)
    measured = ReportData("m", summary={"output_sqnr_db": {"y": 40.0}})
    assert conclusions.next_steps(measured)[0]["kind"] == "good"
    measured.layers = [{"name": "a", "scheme": "float", "multiply_adds": 4, "reason": ""}]
    assert conclusions.next_steps(measured)[0]["text"] == "No layer is quantized."


def test_commands_write_reports(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "ledger.json").write_text(json.dumps(LEDGER))
    float_model = str(demo.model_path())
    arguments = ["digits-int8.onnx", "--data", "data", "--no-latency"]
    commands = {
        "compare.html": ["compare", float_model, *arguments, "--report", "compare.html"],
        "report.html": [
            *("report", *arguments, "--float", float_model),
            *("--ledger", "ledger.json", "-o", "report.html"),
        ],
    }
    for name, command in commands.items():
        done = CliRunner().invoke(main, command)
        assert done.exit_code == 0, done.output
        found = json.loads((folder / name).with_suffix(".json").read_text())
        assert found["format"] == "bitwright-report" and len(found["worst_inputs"]) == 3
        assert (found["ledger"] is not None) == (name == "report.html")


def test_quantize_writes_a_report(folder, monkeypatch):
    monkeypatch.chdir(folder)
    options = ["--data", "data", "-o", "again.onnx", "--report", "again.html", "--no-latency"]
    done = CliRunner().invoke(main, ["quantize", str(demo.model_path()), *options, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads((folder / "again.json").read_text())
    assert found["reproduce"]["files"]["quantized"]["name"] == "again.onnx"
    assert any("no batch was held out" in note for note in found["notes"])


def test_a_bad_report_path_fails_before_the_work(folder, monkeypatch):
    monkeypatch.chdir(folder)
    options = ["--data", "data", "-o", "never.onnx", "--report", "x.txt"]
    done = CliRunner().invoke(main, ["quantize", str(demo.model_path()), *options])
    assert done.exit_code == 2 and not (folder / "never.onnx").exists()
