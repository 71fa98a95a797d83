"""Executables: repr, calls, copies and pickles."""

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import bitwright as bw
from bitwright import demo
from bitwright.errors import BitwrightError, RunError


def adder(name="adder"):
    b = bw.Builder(name)
    x, y = b.input("x", "f32[n, 3]"), b.input("y", "f32[n, 3]")
    return b.build(sum=b.add(x, b.mul(y, 2.0)))


def counter():
    b = bw.Builder("counter")
    total = b.state("total", np.zeros(2, np.float32))
    after = b.add(total, b.input("x", "f32[2]"), name="after")
    b.update(total, after)
    return b.build(y=b.neg(after))


X, Y = np.ones((2, 3), np.float32), np.full((2, 3), 4, np.float32)


# inputs and outputs


@pytest.mark.parametrize("target", ["cpu", "reference"])
def test_inputs_and_outputs_have_names_types_and_shapes(target):
    exe = bw.compile(demo.model_path(), target=target)
    assert list(exe.inputs) == ["image"] == list(exe.input_names)
    assert str(exe.inputs["image"]) == "f32[batch, 1, 8, 8]"
    assert exe.inputs["image"].dtype == bw.dtype("f32") and exe.inputs["image"].shape[1:] == (
        1,
        8,
        8,
    )
    assert str(exe.outputs["logits"]) == "f32[batch, 10]"


@pytest.mark.parametrize("target", ["cpu", "reference"])
def test_inputs_by_name_in_the_call(target):
    exe = bw.compile(adder(), target=target)
    for found in (exe(x=X, y=Y), exe(X, y=Y), exe(X, Y), exe({"x": X, "y": Y}), exe({"x": X}, y=Y)):
        assert (found["sum"] == 9).all()
    out = np.empty((2, 3), np.float32)
    assert exe(x=X, y=Y, out={"sum": out})["sum"] is out
    with pytest.raises(RunError, match="input 'x' is given twice"):
        exe(X, x=X, y=Y)
    with pytest.raises(RunError, match="there is no input 'z'"):
        exe(X, Y, z=X)
    with pytest.raises(RunError, match="input 'y' is missing"):
        exe(x=X)
    with pytest.raises(RunError, match="too many inputs"):
        exe(X, Y, X)


def test_an_input_may_be_named_like_an_option():
    b = bw.Builder("m")
    exe = bw.compile(b.build(y=b.neg(b.input("out", "f32[n]"))))
    assert exe(out=X[0])["y"].tolist() == [-1, -1, -1]


# repr and HTML


def test_reprs_are_one_line():
    graph = adder()
    assert repr(graph) == "<graph 'adder': x f32[n, 3], y f32[n, 3] -> sum f32[n, 3], 5 nodes>"
    exe = bw.compile(graph, threads=2)
    facts = "x f32[n, 3], y f32[n, 3] -> sum f32[n, 3]"
    assert repr(exe) == f"<executable 'adder' on the CPU with 2 threads: {facts}>"
    assert "in the interpreter" in repr(bw.compile(graph, target="reference"))
    assert "with 1 thread:" in repr(bw.compile(demo.model_path(), threads=1))
    b = bw.Builder("many")
    many = b.build(*[b.neg(b.input(f"x{i}", "f32[2]")) for i in range(9)])
    assert "x3 f32[2], … 5 more ->" in repr(many) and "\n" not in repr(many)


@pytest.fixture(scope="module")
def quantized():
    return bw.quantize(demo.model_path(), demo.calibration())


def test_a_quantized_model_and_its_report_in_one_line(quantized):
    text = repr(quantized)
    assert text.startswith("<quantized 'digits': ") and "MB ->" in text and "logits" in text
    assert "\n" not in text and len(text) < 250
    assert repr(quantized.report).startswith(f"<report of {len(quantized.report.layers)} layers")
    assert "\n" not in repr(quantized.report) and len(repr(quantized.report)) < 250
    assert "\n" in str(quantized.report)


def test_notebooks_get_tables(quantized):
    b = bw.Builder("<m>")
    graph = b.build(**{"a&b": b.relu(b.input("x", "f32[n]"))})
    exe = bw.compile(graph)
    for shown in (graph, exe, quantized, quantized.report):
        text = shown._repr_html_()
        assert text.startswith("<div>") and text.endswith("</div>") and "<table>" in text
    assert "&lt;m&gt;" in graph._repr_html_() and "a&amp;b" in exe._repr_html_()
    assert "relu 1" in graph._repr_html_() and "f32[n]" in exe._repr_html_()
    assert quantized.report.layers[0].name in quantized._repr_html_()
    many = bw.Builder("many")
    graph = many.build(*[many.neg(many.input(f"x{i}", "f32[2]")) for i in range(150)])
    assert "… 100 more rows" in graph._repr_html_()


# copies


@pytest.mark.parametrize("target", ["cpu", "reference"])
@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy])
def test_a_copy_has_its_own_states(target, make):
    exe = bw.compile(counter(), target=target)
    exe.run({"x": np.ones(2, np.float32)})
    twin = make(exe)
    assert type(twin) is type(exe) and repr(twin) == repr(exe)
    assert twin.run({"x": np.ones(2, np.float32)})["y"].tolist() == [-2, -2]
    assert twin.run({"x": np.ones(2, np.float32)})["y"].tolist() == [-3, -3]
    assert exe.run({"x": np.ones(2, np.float32)})["y"].tolist() == [-2, -2]


def test_a_copy_of_a_cached_model():
    exe = bw.compile(demo.model_path(), threads=1)
    inputs, _ = demo.held_out()
    expected = exe.run(inputs)["logits"]
    np.testing.assert_array_equal(copy.copy(exe).run(inputs)["logits"], expected)
    assert copy.copy(exe).graph.name == exe.graph.name


# pickles


@pytest.mark.parametrize("target", ["cpu", "reference"])
@pytest.mark.parametrize("precision", [None, "mixed_bf16", {"kinds": {"compute": "f16"}}])
def test_a_pickle_holds_the_model_and_its_options(target, precision):
    exe = bw.compile(bw.load(demo.model_path()), target=target, threads=1, precision=precision)
    again = pickle.loads(pickle.dumps(exe))
    inputs, _ = demo.held_out()
    np.testing.assert_array_equal(again.run(inputs)["logits"], exe.run(inputs)["logits"])
    assert repr(again) == repr(exe) and again.graph.name == exe.graph.name
    third = pickle.loads(pickle.dumps(again))
    assert third.output_names == exe.output_names


@pytest.mark.parametrize("cache", ["folder", "off"])
def test_pickles_of_models_in_files(tmp_path, monkeypatch, cache):
    monkeypatch.setenv("BITWRIGHT_CACHE", str(tmp_path / "cache") if cache == "folder" else "off")
    model = tmp_path / "digits.onnx"
    bw.export_onnx(bw.load(demo.model_path()), model, external_data="digits.data")
    exe = bw.compile(model)
    data = pickle.dumps(exe)
    inputs, _ = demo.held_out()
    expected = exe.run(inputs)["logits"]
    moved = model.read_bytes()
    model.unlink()
    (tmp_path / "digits.data").unlink()
    again = pickle.loads(data)  # needs no file
    np.testing.assert_array_equal(again.run(inputs)["logits"], expected)
    with pytest.raises(BitwrightError, match="file is not what it was"):
        pickle.dumps(exe)
    model.write_bytes(moved + b"\0")
    with pytest.raises(BitwrightError, match="file is not what it was"):
        pickle.dumps(exe)


def test_a_pickle_contains_the_states():
    exe = bw.compile(counter())
    exe.run({"x": np.ones(2, np.float32)})
    again = pickle.loads(pickle.dumps(exe))
    assert again.run({"x": np.ones(2, np.float32)})["y"].tolist() == [-2, -2]
    again.reset()
    assert again.run({"x": np.ones(2, np.float32)})["y"].tolist() == [-1, -1]


def test_another_process_runs_a_pickle(tmp_path):
    exe = bw.compile(adder(), threads=1)
    (tmp_path / "exe.pickle").write_bytes(pickle.dumps(exe))
    code = (
        "import pickle, sys, numpy as np\n"
        "exe = pickle.load(open(sys.argv[1], 'rb'))\n"
        "print(exe(x=np.ones((1, 3), 'f'), y=np.ones((1, 3), 'f'))['sum'].tolist())"
    )
    source = Path(bw.__file__).parent.parent
    found = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "exe.pickle")],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(source)},
    )
    assert found.stdout.strip() == "[[3.0, 3.0, 3.0]]"


def test_graphs_and_quantized_models_are_pickled(quantized):
    again = pickle.loads(pickle.dumps(quantized))
    assert bw.to_text(again.graph) == bw.to_text(quantized.graph)
    assert again.report == quantized.report
    b = bw.Builder("deep")
    x = b.input("x", "f32[n]")
    for _ in range(3000):
        x = b.neg(x)
    graph = b.build(y=x)
    assert bw.to_text(copy.deepcopy(graph)) == bw.to_text(pickle.loads(pickle.dumps(graph)))


def test_the_error_of_an_executable_that_cannot_be_pickled():
    from bitwright.passes.manager import History
    from bitwright.pipeline import compile_simple

    exe = compile_simple(adder(), History())
    with pytest.raises(BitwrightError, match=r"cannot be pickled: it was not made by bw\.compile"):
        pickle.dumps(exe)
