"""The demo model, its images, and `make demo`."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto

import bitwright as bw
from bitwright import demo

ACCURACY = 0.995
SCRIPT = Path(__file__).parents[2] / "examples" / "demo.py"


def test_held_out_accuracy_here_and_in_onnx_runtime():
    session = onnxruntime.InferenceSession(demo.model_path())
    inputs, labels = demo.held_out()
    (expected,) = session.run(["logits"], inputs)
    logits = bw.compile(bw.load(demo.model_path())).run(inputs)["logits"]
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    assert len(labels) == 600
    assert (logits.argmax(1) == labels).mean() >= ACCURACY


def test_inputs_match_the_model():
    inputs, labels = demo.held_out()
    assert labels.dtype == np.int64 and set(labels) == set(range(10))
    batches = demo.calibration(batch_size=50)
    assert [len(batch["image"]) for batch in batches] == [50, 50, 28]
    for batch in (inputs, *batches):
        assert list(batch) == ["image"]
        assert batch["image"].dtype == np.float32
        assert batch["image"].shape[1:] == (1, 8, 8)
        assert batch["image"].min() == 0 and batch["image"].max() == 1


def test_no_calibration_image_is_held_out():
    inputs, _ = demo.held_out()
    held_out = {image.tobytes() for image in inputs["image"]}
    calibration = np.concatenate([batch["image"] for batch in demo.calibration()])
    assert not held_out & {image.tobytes() for image in calibration}


def test_the_model_has_many_ops_and_no_local_paths():
    model = onnx.load(demo.model_path())
    (image,) = model.graph.input
    assert image.type.tensor_type.elem_type == TensorProto.FLOAT
    assert image.type.tensor_type.shape.dim[0].dim_param == "batch"
    kinds = {node.op_type for node in model.graph.node}
    assert {"Conv", "BatchNormalization", "Relu", "Add", "MaxPool", "MatMul"} <= kinds
    assert demo.model_path().stat().st_size < 200_000
    assert b".py" not in demo.model_path().read_bytes()


def test_make_demo_keeps_the_accuracy_and_writes_files(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("demo_script", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.main(tmp_path / "made")
    text = capsys.readouterr().out
    assert " of 600" in text and "int8, in ONNX Runtime" in text
    facts = json.loads((tmp_path / "made" / "comparison.json").read_text())
    float_bytes = facts["models"]["float"]["file_bytes"]
    assert [found["images"] for found in facts["models"].values()] == [600] * 3
    assert facts["models"]["float"]["accuracy"] >= ACCURACY
    for name in ("int8", "int8, in ONNX Runtime"):
        assert facts["models"][name]["accuracy"] >= ACCURACY - 0.005
        assert facts["models"][name]["file_bytes"] < 0.35 * float_bytes
    assert facts["quantization"]["int8_mac_fraction"] > 0.9
    assert facts["comparison"]["outputs"]["logits"]["same_top1"] > 0.99
    assert bw.load(tmp_path / "made" / "digits-int8.onnx").outputs[0][0] == "logits"
