"""The headline of a report and its next steps, from the measured facts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from bitwright.report.html.data import ReportData, number

LOW_OUTPUT_DB = 20.0
"""Output errors above -20 dB (1% of the signal's power) often change predictions."""
RELATIVE_DROP = 0.01
FLOAT_SHARE = 0.05
MOST_STEPS = 5


def headline(title: str, summary: Mapping[str, Any]) -> str:
    """What changed, in one sentence."""
    parts = []
    size = summary.get("size")
    if size and min(size["before"], size["after"]) > 0:
        parts.append(_times(size["before"] / size["after"], "smaller", "larger"))
    if summary.get("speedup"):
        parts.append(_times(summary["speedup"], "faster", "slower"))
    scores = [f"{s['name']} {s['before']:.4g} → {s['after']:.4g}" for s in _scored(summary)]
    outputs = [v for v in summary.get("output_sqnr_db", {}).values() if v is not None]
    if not scores and outputs:
        scores = [f"outputs at {min(outputs):.1f} dB"]
    text = f"{title} is {' and '.join(parts)}" if parts else ""
    if not parts and (latency := summary.get("latency")):
        text = f"{title} takes {latency['after']['median_ms']:.3g} ms"
    found = [part for part in (text, *scores[:2]) if part]
    return "; ".join(found or [f"{title}: nothing was measured"]) + "."


def _times(ratio: float, better: str, worse: str) -> str:
    if 0.995 <= ratio < 1.005:
        return f"not {better}"
    return f"{ratio:.2f}× {better}" if ratio > 1 else f"{1 / ratio:.2f}× {worse}"


def _scored(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    scores = summary.get("scores", [])
    return [s for s in scores if s["before"] is not None and s["after"] is not None]


def next_steps(data: ReportData) -> list[dict[str, str]]:
    """At most a few steps, the most important first; `kind` is act, check or good."""
    found = [*_accuracy(data), *_speed(data), *_unknown(data)][:MOST_STEPS]
    is_measured = bool(_scored(data.summary) or data.summary.get("output_sqnr_db"))
    if is_measured and not any(step["kind"] == "act" for step in found):
        text = "Nothing stands out: the quantized model is ready for tests on your task."
        found.insert(0, {"kind": "good", "text": text})
    return found


def _accuracy(data: ReportData) -> Iterable[dict[str, str]]:
    summary = data.summary
    drops = [s for s in _scored(summary) if _drop(s) > RELATIVE_DROP]
    for score in drops[:1]:
        yield _act(
            f"{score['name']} fell by {_drop(score):.1%}, from {score['before']:.4g} "
            f"to {score['after']:.4g}."
        )
    outputs = {n: v for n, v in summary.get("output_sqnr_db", {}).items() if v is not None}
    worst = min(outputs, key=lambda name: outputs[name], default="")
    is_low = bool(outputs) and outputs[worst] < LOW_OUTPUT_DB
    if is_low:
        yield _act(f"Output {worst} is at {outputs[worst]:.1f} dB: check the predictions.")
    lines = (data.ledger or {}).get("lines") or []
    fixes = [one for one in lines if isinstance(one.get("fix"), Mapping) and one["fix"].get("text")]
    if fixes:
        line = max(fixes, key=lambda one: number(one.get("share")))
        share = f"{number(line.get('share')):.0%}"
        yield {
            "kind": "act" if drops or is_low else "check",
            "text": f"Largest cause of error: {line.get('layer')} ({share}). {line['fix']['text']}",
        }
    elif (drops or is_low) and (rows := _by_error(data.layers)):
        names = ", ".join(row["name"] for row in rows[:3])
        yield _act(f"Layers with the largest error: {names}. A recipe can keep them in float.")


def _by_error(layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    known = [row for row in layers if row.get("sqnr_db") is not None]
    return sorted(known, key=lambda row: row["sqnr_db"])


def _drop(score: Mapping[str, Any]) -> float:
    """The relative decrease; scores where less is better count as increases."""
    before = abs(score["before"])
    return float((score["before"] - score["after"]) / before) if before else 0.0


def _speed(data: ReportData) -> Iterable[dict[str, str]]:
    if data.layers and all(row["scheme"] == "float" for row in data.layers):
        yield _act("No layer is quantized.")
        return
    speedup = data.summary.get("speedup")
    if speedup is not None and speedup < 1.05:
        yield _act("The quantized model is not faster here. Colour the graph by time to see why.")
    total = sum(row.get("multiply_adds") or 0 for row in data.layers)
    floats = [row for row in data.layers if row["scheme"] == "float"]
    skipped = sum(row.get("multiply_adds") or 0 for row in floats)
    if total and skipped / total > FLOAT_SHARE:
        most = max(floats, key=lambda row: row.get("multiply_adds") or 0)
        why = f" {most['name']}: {most['reason']}." if most.get("reason") else ""
        yield _check(f"{skipped / total:.0%} of the multiply-adds stay in float.{why}")
    fallbacks = [one for one in data.skipped if one["kind"] == "interpreter fallback"]
    if fallbacks:
        yield _act(f"{len(fallbacks)} steps run in the interpreter, which is slow.")


def _unknown(data: ReportData) -> Iterable[dict[str, str]]:
    if data.notes:
        yield _check(f"{data.notes[0][:1].upper()}{data.notes[0][1:]}.")
    if not data.summary.get("scores"):
        yield _check("No score was measured. Evaluate both models on your task before you ship.")
    if data.summary.get("latency") is None:
        yield _check("The speed was not measured in this report.")


def _act(text: str) -> dict[str, str]:
    return {"kind": "act", "text": text}


def _check(text: str) -> dict[str, str]:
    return {"kind": "check", "text": text}
