"""`make demo`: quantizes the demo model and compares accuracy and size.

    python examples/demo.py [FOLDER]

Writes digits-int8.onnx and comparison.json to FOLDER (default demo-output): accuracy and size of
each model, the scheme of each layer, and the distance of outputs and layers from the float model.
"""

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import bitwright as bw
from bitwright import demo
from bitwright.report.compare import compare

HELD_OUT_BATCH = 100


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    small = folder / "digits-int8.onnx"
    quantized = bw.quantize(demo.model_path(), data=demo.calibration())
    quantized.save(small)
    print(quantized.report)

    models = {"float": measure(bw.compile(demo.model_path()), demo.model_path())}
    models["int8"] = measure(bw.compile(small), small)
    if importlib.util.find_spec("onnxruntime"):
        models["int8, in ONNX Runtime"] = measure(onnx_runtime(small), small)
    show(models)

    inputs, labels = demo.held_out()
    batches = [
        {"image": inputs["image"][start : start + HELD_OUT_BATCH]}
        for start in range(0, len(labels), HELD_OUT_BATCH)
    ]
    distance = compare(demo.model_path(), small, batches)
    output = distance.outputs["logits"]
    print(
        f"logits on held-out images: {output.sqnr_db:.1f} dB, cosine {output.cosine:.6f}, ", end=""
    )
    print(f"the same digit for {output.same_top1:.2%}")
    facts = {
        "models": models,
        "quantization": quantized.report.to_json(),
        "comparison": distance.as_json(),
    }
    written = folder / "comparison.json"
    written.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    print(f"written: {small}, {written}")


def measure(model: Callable[[dict[str, Any]], dict[str, Any]], file: Path) -> dict[str, Any]:
    inputs, labels = demo.held_out()
    correct = int((model(inputs)["logits"].argmax(1) == labels).sum())
    return {
        "correct": correct,
        "images": len(labels),
        "accuracy": correct / len(labels),
        "file_bytes": file.stat().st_size,
    }


def onnx_runtime(file: Path) -> Callable[[dict[str, Any]], dict[str, Any]]:
    import onnxruntime

    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    return lambda inputs: dict(zip(["logits"], session.run(["logits"], inputs), strict=True))


def show(models: dict[str, dict[str, Any]]) -> None:
    table = Table("model", "correct", "accuracy", "file", "of float")
    whole = models["float"]["file_bytes"]
    for name, found in models.items():
        table.add_row(
            name,
            f"{found['correct']} of {found['images']}",
            f"{found['accuracy']:.2%}",
            f"{found['file_bytes'] / 1e3:.1f} kB",
            f"{found['file_bytes'] / whole:.2f}",
        )
    Console().print(table, highlight=False)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "demo-output"))
