"""The command line: what it prints, its JSON, and its errors."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from bitwright.cli import main
from bitwright.ops.core.builder import Builder


@pytest.fixture
def model(tmp_path):
    b = Builder("mlp")
    x = b.input("x", "f32[batch, 4]")
    h = b.relu(b.relu(b.matmul(x, b.parameter("w", np.ones((4, 3), np.float32)))), name="hidden")
    path = tmp_path / "mlp.txt"
    b.build(y=b.add(h, 0.0, name="shifted")).save(path)
    return str(path)


def call(*args, code=0):
    result = CliRunner().invoke(main, [str(a) for a in args])
    assert result.exit_code == code, result.output
    return result.output


def test_inspect(model):
    text = call("inspect", model)
    for part in ("x: f32[batch, 4]", "y: f32[batch, 3]", "weights", "13", "at batch=1", "relu 2"):
        assert part in text
    facts = json.loads(call("inspect", model, "--json", "--size", "batch=10"))
    assert facts["flops"] >= 2 * 10 * 4 * 3 and facts["parameter_bytes"] >= 48
    assert facts["sizes"] == {"batch": 10}


def test_opt_prints_text_that_opt_reads(model, tmp_path):
    text = call("opt", model, "--passes", "canonicalize,eliminate_dead")
    assert text.count("relu(") == 1 and "add(" not in text
    again = tmp_path / "again.bw"
    call("opt", model, "--pipeline", "inference", "-o", again)
    assert "relu 1" in call("inspect", again)


def test_run_with_random_and_given_inputs(model, tmp_path):
    call("run", model, "--size", "batch=2", "-o", tmp_path / "out.npz")
    with np.load(tmp_path / "out.npz") as found:
        assert found["y"].shape == (2, 3)
    call("run", model, "--target", "reference", "--threads", 1)
    np.savez(tmp_path / "in.npz", x=np.ones((5, 4), np.float32))
    facts = json.loads(call("run", model, "--inputs", tmp_path / "in.npz", "--json"))
    assert facts["outputs"]["y"]["type"] == "f32[5, 3]" and facts["outputs"]["y"]["max"] == 4


def test_explain_follows_a_node_through_rules_and_stages(model):
    text = call("explain", model, "--node", "hidden")
    assert "relu-of-relu on %hidden fired" in text
    assert "%hidden = relu(%matmul)" in text
    assert "step 0: matmul_f32" in text and "in output" in text
    found = json.loads(call("explain", model, "--node", "shifted", "--json"))
    assert any(r["rule"] == "add-zero" and r["fired"] for r in found["rules"])
    stages = [s["stage"] for s in found["stages"]]
    assert stages[0] == "input" and "canonicalize" in stages
    assert "relu-of-relu 1" in call("explain", model)
    text = call("explain", model, "--schedule")
    assert "1 kernel calls, 0 interpreter fallbacks" in text and "matmul_f32" in text


def test_explain_shows_fusion_and_memory(model):
    assert "1 regions" in call("explain", model, "--fusion")
    facts = json.loads(call("explain", model, "--fusion", "--json"))
    assert facts["regions"][0]["anchor"] == "matmul" and facts["regions"][0]["epilogue"] == ["relu"]
    assert "arena: 0 bytes at batch=3" in call("explain", model, "--size", "batch=3")


def test_explain_profiles(model, tmp_path):
    text = call("explain", model, "--profile", "--threads", 1, "--rounds", 2)
    for part in ("matmul_f32", "relu", "peaks measured here", "limited by"):
        assert part in text
    np.savez(tmp_path / "in.npz", x=np.ones((5, 4), np.float32))
    args = ("--profile", "--threads", 1, "--rounds", 2, "--feeds", tmp_path / "in.npz", "--json")
    facts = json.loads(call("explain", model, *args))
    assert facts["sizes"] == {"batch": 5} and facts["threads"] == 1
    assert [row["op"] for row in facts["steps"]] == ["matmul"]
    assert facts["operations"] == 2 * 5 * 4 * 3 + 5 * 3


def test_ops_lists_every_op():
    rows = json.loads(call("ops", "--json"))
    assert {"matmul", "attention", "if", "quantize"} <= {row["op"] for row in rows}


@pytest.mark.parametrize(
    "args, message",
    [
        (["inspect", "missing.onnx"], "cannot read missing.onnx"),
        (["opt", "MODEL", "--passes", "nonsense"], "no pass is named 'nonsense'"),
        (["explain", "MODEL", "--node", "hiden"], "Did you mean 'hidden'"),
        (["run", "MODEL", "--inputs", "missing.npz"], "cannot read inputs from missing.npz"),
    ],
)
def test_errors_are_one_paragraph_and_exit_status_2(model, args, message):
    text = call(*[model if a == "MODEL" else a for a in args], code=2)
    assert message in text.replace("\n", " ") and "Traceback" not in text


def test_debug_shows_the_traceback(model):
    result = CliRunner().invoke(main, ["--debug", "inspect", "missing.onnx"])
    assert result.exception is not None and "cannot read" in str(result.exception)
