"""The figures of a report before and after quantization, and the facts to reproduce them."""

from __future__ import annotations

import datetime
import hashlib
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from bitwright.errors import BitwrightError
from bitwright.ir.graph import Graph
from bitwright.quant.model.report import QuantizationReport, weight_bytes
from bitwright.report.compare import Comparison, file_bytes

PACKAGES = ("bitwright", "numpy", "onnx", "llvmlite")


def summary(
    graph: Graph,
    given: Graph | None,
    report: QuantizationReport | None,
    comparison: Comparison | None,
    files: tuple[Any, Any] | None,
    scores: Mapping[str, Mapping[str, float]] | None,
) -> dict[str, Any]:
    """Figures before and after, as far as they are known."""
    found: dict[str, Any] = {"layers": sum(1 for n in graph.nodes if not n.is_boundary)}
    weights: tuple[int, int] | None = None
    if report is not None:
        weights = report.float_bytes, report.quantized_bytes
        found["int8_mac_fraction"] = report.int8_mac_fraction
        found["output_sqnr_db"] = dict(report.output_sqnr_db)
        found["measured_on"] = _measured_on(report)
    elif given is not None:
        weights = weight_bytes(given), weight_bytes(graph)
    if comparison is not None and not (report is not None and report.held_out_batches):
        outputs = {name: one.as_json() for name, one in comparison.outputs.items()}
        found["output_sqnr_db"] = {n: one["sqnr_db"] for n, one in outputs.items()}
        found["same_top1"] = {n: one["same_top1"] for n, one in outputs.items()}
        found["measured_on"] = f"{len(comparison.samples)} batches of the given data"
    if weights is not None and min(weights) > 0:
        found["weights"] = {"before": weights[0], "after": weights[1]}
        found["size"] = {**found["weights"], "what": "weights"}
    if files is not None and all(Path(file).is_file() for file in files):
        before, after = (file_bytes(Path(file)) for file in files)
        found["size"] = {"before": before, "after": after, "what": "files"}
    if scores:
        names = dict.fromkeys(name for side in scores.values() for name in side)
        sides = [scores.get(side, {}) for side in ("float", "quantized")]
        found["scores"] = [
            {
                "name": name,
                "before": _finite(sides[0].get(name)),
                "after": _finite(sides[1].get(name)),
            }
            for name in names
        ]
    return found


def _finite(number: float | None) -> float | None:
    return float(number) if number is not None and np.isfinite(number) else None


def _measured_on(report: QuantizationReport) -> str:
    if not report.is_measured:
        return "nothing: there was no data"
    count = report.held_out_batches
    if not count:
        return "calibration data, which overstates accuracy"
    return f"{count} held-out calibration batch{'es' * (count != 1)}"


def timed(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Latency and memory as pairs."""
    found: dict[str, Any] = {
        name: facts[name] for name in ("threads", "rounds", "inputs", "target")
    }
    found["speedup"] = facts.get("speedup")
    found["latency"] = {
        "before": facts["latency"].get("float"),
        "after": facts["latency"]["quantized"],
    }
    memory = {side: facts["memory"].get(side) for side in ("float", "quantized")}
    if memory["quantized"] is not None:
        totals = {side: sum(one.values()) if one else None for side, one in memory.items()}
        found["memory"] = {"before": totals["float"], "after": totals["quantized"], "parts": memory}
    return found


def reproduce(
    report: QuantizationReport | None,
    command: str,
    files: tuple[Any, Any] | None,
    summary: Mapping[str, Any],
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "command": command,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {name: text for name in PACKAGES if (text := _version(name))},
    }
    if report is not None:
        found["recipe"], found["seconds"] = report.recipe, report.seconds
    found |= {name: summary[name] for name in ("threads", "target", "inputs") if name in summary}
    if files is not None:
        sides = zip(("float", "quantized"), files, strict=True)
        found["files"] = {side: _file(Path(file)) for side, file in sides if Path(file).is_file()}
    return found


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _file(path: Path) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise BitwrightError(f"cannot read {path}: {error.strerror or error}") from None
    return {"name": path.name, "bytes": file_bytes(path), "sha256": digest}
