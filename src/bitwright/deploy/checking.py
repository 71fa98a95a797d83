"""`bw.check_file`: predicts what runtimes do with each quantized node of an ONNX file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from onnx import ModelProto

from bitwright.deploy.onnxruntime_rules import OnnxRuntimeRules
from bitwright.deploy.openvino_rules import OpenVinoRules
from bitwright.deploy.tensorrt_rules import LABEL, TensorRtRules
from bitwright.deploy.view import GraphView, Verdict
from bitwright.errors import BitwrightError

RULES: dict[str, Any] = {
    "onnxruntime-cpu": OnnxRuntimeRules,
    "openvino": OpenVinoRules,
    "tensorrt": TensorRtRules,
}
NOTES = {
    "onnxruntime-cpu": "rules of ONNX Runtime 1.31 on x86-64",
    "openvino": "rules of OpenVINO 2026.4 on x86-64; products only",
    "tensorrt": LABEL,
}
STATUSES = ("rejected", "unsafe", "fallback", "fused")


@dataclass
class TargetCheck:
    """The verdicts for one target."""

    target: str
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        found = Counter(verdict.status for verdict in self.verdicts)
        return {status: found[status] for status in STATUSES if found[status]}

    @property
    def is_ok(self) -> bool:
        """Whether the target loads the file and computes it correctly on every processor."""
        return not {"rejected", "unsafe"} & self.counts.keys()

    def summary(self) -> str:
        counts = ", ".join(f"{count} {status}" for status, count in self.counts.items())
        return f"{self.target}: {counts or 'no quantized nodes'} ({NOTES[self.target]})"

    def to_json(self) -> dict[str, Any]:
        nodes = [asdict(verdict) for verdict in self.verdicts]
        return {"target": self.target, "is_ok": self.is_ok, "counts": self.counts, "nodes": nodes}


def check_file(
    model: str | Path | ModelProto, targets: str | Iterable[str] = "onnxruntime-cpu"
) -> list[TargetCheck]:
    """Predict for each target what it does with each quantized node of an ONNX file.

    A node is "fused" (an integer kernel), "fallback" (dequantized and computed in float), "unsafe"
    (an integer kernel that saturates on some processors) or "rejected". Nothing is run.
    """
    names = [targets] if isinstance(targets, str) else list(targets)
    for name in names:
        if name not in RULES:
            raise BitwrightError(f"there is no target {name!r}", expected=" or ".join(RULES))
    view = GraphView(model)
    return [TargetCheck(name, list(RULES[name](view).verdicts())) for name in names]
