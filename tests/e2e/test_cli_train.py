"""`bitwright train`: files in, a trained file out; resuming, quantization, refusals."""

import json
import signal

import numpy as np
import pytest
from click.testing import CliRunner

import bitwright as bw
from bitwright.cli import main
from bitwright.train.history import Reporter

BASE = "--loss", "cross_entropy", "--batch-size", 16, "--threads", 1


def call(*args, code=0):
    result = CliRunner().invoke(main, ["train", *(str(a) for a in args)])
    assert result.exit_code == code, result.output
    return result


def samples(count, seed):
    """Points in four classes, by the signs of two sums of inputs."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 6)).astype(np.float32)
    return {"x": x, "labels": 2 * (x[:, :3].sum(1) > 0) + (x[:, 3:].sum(1) > 0)}


@pytest.fixture
def folder(tmp_path):
    """A folder with model.onnx, train.npz and test.npz."""
    rng = np.random.default_rng(0)
    b = bw.Builder("points")
    x = b.input("x", "f32[batch, 6]")
    for i, (given, made) in enumerate(((6, 24), (24, 16), (16, 4))):
        w = rng.normal(0, given**-0.5, (given, made)).astype(np.float32)
        x = b.matmul(x, b.parameter(f"w{i}", w))
        x = b.add(x, b.parameter(f"b{i}", np.zeros(made, np.float32)))
        x = b.relu(x) if i < 2 else x
    b.build(logits=x).save(tmp_path / "model.onnx")
    np.savez(tmp_path / "train.npz", **samples(256, 1), ids=np.arange(3))
    np.savez(tmp_path / "test.npz", **samples(128, 2))
    return tmp_path


def accuracy(model, data):
    found = bw.compile(model, threads=1).run({"x": data["x"]})["logits"]
    return float((found.argmax(1) == data["labels"]).mean())


def arguments(folder, *more, data="train.npz", model="model.onnx"):
    return folder / model, "--data", folder / data, "-o", folder / "out.onnx", *more


def weights(path):
    return {v.name: v.node.attrs["value"] for v in bw.load(path).parameters}


def test_a_model_is_trained_evaluated_and_written(folder):
    result = call(
        *arguments(folder, *BASE, "--epochs", 8, "--evaluate", folder / "test.npz"),
        *("--lr", 0.02, "--schedule", "cosine", "--warmup", 4, "--clip", 1, "--metric", "accuracy"),
        *("--metrics", folder / "m.jsonl", "--tensorboard", folder / "board"),
    )
    before, after = (
        accuracy(folder / name, samples(128, 2)) for name in ("model.onnx", "out.onnx")
    )
    assert before < 0.5 and after > 0.85
    lines = result.stderr.splitlines()
    assert lines[0].startswith("step 1/128  loss ") and "lr 0.005" in lines[0]
    assert any("samples/s" in line and line.endswith(" left") for line in lines)
    best = f"accuracy {after:.5g}"
    assert any(line.startswith("evaluation after step 16: loss ") for line in lines)
    assert best in result.stdout and "128 steps in" in result.stdout and "out.onnx" in result.stdout
    rows = [json.loads(line) for line in (folder / "m.jsonl").read_text().splitlines()]
    assert {"step", "loss", "lr", "speed", "grad_norm"} <= rows[0].keys()
    assert rows[-1]["step"] == 128 and "eval_accuracy" in rows[-1]
    assert next((folder / "board").iterdir()).name.startswith("events.out.tfevents.")


def test_a_table_frozen_parameters_and_averaged_weights_in_safetensors(folder):
    data = samples(64, 1)
    head = ",".join([*(f"x.{i}" for i in range(6)), "kind"])
    rows = np.c_[data["x"], data["labels"]]
    np.savetxt(folder / "rows.csv", rows, delimiter=",", header=head, comments="")
    output = folder / "out.safetensors"
    result = call(
        *(folder / "model.onnx", "--data", folder / "rows.csv", "-o", output, *BASE, "--json"),
        *("--labels", "kind", "--steps", 6, "--ema", 0.5, "--accumulate", 2, "--freeze", "w0"),
        *("--optimizer", "sgd", "--momentum", 0.9, "--nesterov", "--lr", 0.1, "--quiet"),
    )
    facts = json.loads(result.stdout)
    assert (facts["steps"], facts["weights"]) == (6, "ema") and facts["loss"] < 2
    assert result.stderr.count("step") == 0
    trained = bw.load_parameters(bw.load(folder / "model.onnx"), output)
    before = weights(folder / "model.onnx")
    for value in trained.parameters:
        is_same = np.array_equal(value.node.attrs["value"], before[value.name])
        assert is_same == (value.name == "w0")


def test_a_resumed_run_gives_the_same_file(folder, monkeypatch, interruptible):
    base = arguments(folder, *BASE, "--steps", 30, "--schedule", "linear", "--quiet")
    call(*base)
    whole = weights(folder / "out.onnx")
    step = Reporter.step

    def interrupted(self, number, *rest):
        step(self, number, *rest)
        if number == 11:
            signal.raise_signal(signal.SIGINT)

    kept = *base, "--checkpoints", folder / "kept"
    with monkeypatch.context() as patched:
        patched.setattr(Reporter, "step", interrupted)
        text = call(*kept, code=130).stderr
    assert "interrupted" in text and "step-000000011" in text
    assert "Resume it" in call(*kept, code=2).stderr
    call(*kept, "--resume")
    found = weights(folder / "out.onnx")
    assert all(np.array_equal(found[name], array) for name, array in whole.items())
    assert "the run had already ended" in call(*kept, "--resume").stdout
    last = folder / "kept" / "step-000000030.safetensors"
    last.write_bytes(last.read_bytes()[:-1])
    text = " ".join(call(*kept, "--resume", code=2).stderr.split())
    assert "Remove it to resume from step-000000011" in text


def test_training_through_quantization_from_float_and_from_files(folder):
    """The float model is its own teacher; the exported int4 file is trained on as ternary, and
    comes closer to the teacher than rounding alone."""
    steps = "--steps", 60, "--optimizer", "adam", "--lr", 0.01, "--batch-size", 32, "--threads", 1
    np.savez(folder / "plain.npz", x=samples(256, 1)["x"])
    call(*arguments(folder, *steps, "--weight-bits", 4, data="plain.npz"), "--quiet")
    x = {"x": samples(128, 2)["x"]}
    expected = bw.compile(folder / "model.onnx", threads=1).run(x)["logits"]
    found = bw.compile(folder / "out.onnx", threads=1).run(x)["logits"]
    assert np.mean(found.argmax(1) == expected.argmax(1)) > 0.9
    output = folder / "ternary.bw"
    call(
        *(folder / "out.onnx", "--data", folder / "plain.npz", "-o", output, *steps, "--quiet"),
        *("--qat", "--weight-bits", "ternary", "--teacher", folder / "model.onnx"),
        *("--distillation", "mse", "--checkpoints", folder / "kept"),
    )
    stored = [
        np.abs(node.attrs["value"]).max()
        for node in bw.load(output).nodes
        if node.op == "constant" and node.types[0].dtype.name == "i8" and node.types[0].rank == 2
    ]
    assert stored[1:-1] == [1] and min(stored[0], stored[-1]) > 1
    rounded = bw.convert_qat(
        bw.prepare_qat(folder / "out.onnx", bw.QatConfig(weight_bits="ternary"))
    )
    errors = [
        np.square(bw.compile(one, threads=1).run(x)["logits"] - expected).mean()
        for one in (rounded, output)
    ]
    assert errors[1] < 0.8 * errors[0], errors
    other = "--qat", "--weight-bits", "binary", "--teacher", folder / "model.onnx", "--resume"
    text = call(
        *(folder / "out.onnx", "--data", folder / "plain.npz", "-o", output, *steps, *other),
        *("--distillation", "mse", "--checkpoints", folder / "kept"),
        code=2,
    ).stderr
    assert "belongs to another run" in text


def test_images_and_a_teacher(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    (tmp_path / "images").mkdir()
    rng = np.random.default_rng(0)
    for i in range(5):
        pixels = rng.integers(0, 256, (6, 6, 3), np.uint8)
        image.fromarray(pixels).save(tmp_path / f"images/{i}.png")
    for name in ("student", "teacher"):
        b = bw.Builder(name)
        w = rng.normal(size=(2, 3, 3, 3)).astype(np.float32)
        x = b.conv(b.input("x", "f32[n, 3, 4, 4]"), b.parameter("w", w), pads=(1, 1, 1, 1))
        b.build(y=x).save(tmp_path / f"{name}.bw")
    result = call(
        *(tmp_path / "student.bw", "--data", tmp_path / "images", "-o", tmp_path / "out.bw"),
        *("--teacher", tmp_path / "teacher.bw", "--distillation", "mse", "--epochs", 20),
        *("--mean", "0.5,0.5,0.5", "--batch-size", 2, "--lr", 0.1, "--threads", 1, "--json"),
    )
    assert json.loads(result.stdout)["steps"] == 60
    expected, found = weights(tmp_path / "teacher.bw")["w"], weights(tmp_path / "out.bw")["w"]
    assert np.abs(found - expected).mean() < 0.3 * np.abs(expected).mean()


def spoil(folder):
    """Data with faults, and a quantized model."""
    data = samples(32, 3)
    np.savez(folder / "plain.npz", x=data["x"])
    np.savez(folder / "nan.npz", x=np.full_like(data["x"], np.nan), labels=data["labels"])
    np.savez(folder / "many.npz", x=data["x"], labels=data["labels"] + 7)
    np.savez(folder / "none.npz", x=data["x"][:0], labels=data["labels"][:0])
    (folder / "files").mkdir()
    np.savez(folder / "files/0.npz", **data)
    np.savez(folder / "files/1.npz", x=data["x"][:, :5], labels=data["labels"])
    quantized = bw.quantize(folder / "model.onnx", [{"x": data["x"]}] * 4, "int8-static")
    quantized.save(folder / "int8.onnx")


FAULTS = [
    ({}, ["--steps", 4], "there is neither a loss nor a teacher"),
    ({}, ["--steps", 4, "--loss", "crossentropy"], "Did you mean 'cross_entropy'"),
    ({}, [*BASE], "expected --epochs or --steps"),
    ({"data": "plain.npz"}, [*BASE, "--steps", 4], "no labels: 'labels' is missing"),
    ({}, [*BASE, "--steps", 4, "--labels", "y"], "no labels: 'y' is missing"),
    ({"data": "nan.npz"}, [*BASE, "--steps", 4], "loss of step 1 is nan: input 'x' of the batch"),
    ({"data": "many.npz"}, [*BASE, "--steps", 4], "is not a class; expected 0 to 3, found"),
    ({"data": "none.npz"}, [*BASE, "--steps", 4], "the data is empty"),
    ({"data": "nothing"}, [*BASE, "--steps", 4], "there is no data at"),
    ({"data": "files"}, [*BASE, "--steps", 4], "batch 1 of epoch 0: input 'x': has the wrong size"),
    ({}, [*BASE, "--epochs", 1, "--accumulate", 99], "fewer batches than one step accumulates"),
    ({}, [*BASE, "--steps", 4, "--evaluate", "plain.npz"], "no labels"),
    ({}, [*BASE, "--steps", 4, "--evaluate", "none.npz"], "the data of --evaluate is empty"),
    ({}, [*BASE, "--steps", 4, "--patience", 2], "patience needs evaluations"),
    ({}, [*BASE, "--steps", 4, "--which", "best"], "expected --evaluate"),
    ({}, [*BASE, "--steps", 4, "--resume"], "nothing to resume from"),
    ({}, [*BASE, "--steps", 4, "--momentum", 0.9], "--momentum is for sgd"),
    ({}, [*BASE, "--steps", 4, "--schedule", "step"], "--drop-every"),
    ({}, [*BASE, "--steps", 4, "--freeze", "conv*"], "matches no parameter"),
    ({}, [*BASE, "--steps", 4, "-o", "model.onnx"], "which the model is read from"),
    ({}, [*BASE, "--steps", 4, "-o", "out.pt"], "no format is known"),
    ({}, [*BASE, "--steps", 4, "-o", "out.safetensors", "--qat"], "expected .onnx or .bw"),
    ({}, [*BASE, "--steps", 4, "--consumer", "openvino"], "expected --qat"),
    ({"model": "int8.onnx"}, ["--steps", 4, "--qat"], "neither a loss nor a teacher"),
    ({"model": "int8.onnx"}, [*BASE, "--steps", 4], "(--qat)"),
]


def test_bad_input_is_one_paragraph(folder, monkeypatch):
    spoil(folder)
    monkeypatch.chdir(folder)
    for places, options, message in FAULTS:
        result = call(*arguments(folder, *options, "--quiet", **places), code=2)
        text = " ".join(result.stderr.split())
        assert message in text and "Traceback" not in text, (options, text)
        assert not (folder / "out.onnx").exists()
