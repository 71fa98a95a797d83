"""Scores of trained int8 models on the GPU beside the CPU's.

    python benchmarks/gpu_scores.py FOLDER --prepare --yardstick TASKS.PY [names]
    python benchmarks/gpu_scores.py FOLDER [names]                          on the GPU machine

`--prepare` quantizes the yardstick's models, runs them on the CPU, and writes per model NAME.bw and
NAME.npz: inputs in few bytes (pixels and token numbers), labels, the CPU's results and scores. The
second command needs these files only. It prints, per model, the metric on the CPU and on the GPU,
their relative difference (wanted: at most 0.1%), how many results are the same, and what ran on the
CPU for want of a kernel.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import bitwright as bw

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]
WANTED = 1e-3
"""The largest relative difference of a score."""


class Images:
    """Softmax over classes; a sample is a picture of bytes."""

    metric = "accuracy"
    samples, batch = 3000, 100

    def pack(self, task: Any, count: int) -> Arrays:
        (name,) = task.sample
        x = np.concatenate([batch[name] for batch in task.evaluation])[:count]
        labels = _closure(task.score)["labels"][:count]
        return {"pixels": np.rint(x * 128 + 128).astype(np.uint8), "labels": labels}

    def feeds(self, data: Mapping[str, Array], name: str) -> Iterator[Arrays]:
        for start in range(0, len(data["pixels"]), self.batch):
            part = data["pixels"][start : start + self.batch].astype(np.float32)
            yield {name: (part - 128) / 128}

    def result(self, outputs: Sequence[Array]) -> Array:
        return outputs[0]

    def score(self, data: Mapping[str, Array], results: Sequence[Array]) -> dict[str, float]:
        found = np.concatenate(list(results)).argmax(-1)
        return {"accuracy": float((found == data["labels"]).mean())}


class Pictures(Images):
    """Logits beside those of the float model."""

    metric = "sqnr_db"
    samples, batch = 50, 1
    mean = np.array([0.485, 0.456, 0.406], np.float32).reshape(3, 1, 1)
    std = np.array([0.229, 0.224, 0.225], np.float32).reshape(3, 1, 1)

    def pack(self, task: Any, count: int) -> Arrays:
        own = _closure(task.score)
        count = min(count, len(task.evaluation))
        at = np.linspace(0, len(task.evaluation) - 1, count).astype(int)
        x = np.concatenate([task.evaluation[n]["x"] for n in at])
        pixels = np.rint((x * self.std + self.mean) * 255).astype(np.uint8)
        return {"pixels": pixels, "labels": own["y"][at], "reference": np.load(own["ref"])[at]}

    def feeds(self, data: Mapping[str, Array], name: str) -> Iterator[Arrays]:
        for picture in data["pixels"]:
            yield {name: ((picture.astype(np.float32) / 255 - self.mean) / self.std)[None]}

    def score(self, data: Mapping[str, Array], results: Sequence[Array]) -> dict[str, float]:
        found, wanted = np.concatenate(list(results)), data["reference"]
        noise = max(float(((found - wanted) ** 2).sum()), 1e-30)
        return {
            "sqnr_db": float(10 * np.log10(float((wanted**2).sum()) / noise)),
            "same_top1": float((found.argmax(1) == wanted.argmax(1)).mean()),
            "accuracy": float((found.argmax(1) == data["labels"]).mean()),
        }


class Sentences:
    """Embeddings beside those of the float model."""

    metric = "cosine"
    samples = 1000

    def pack(self, task: Any, count: int) -> Arrays:
        ids = np.concatenate([b["input_ids"] for b in task.evaluation[:count]])
        lengths = np.concatenate([b["attention_mask"].sum(1) for b in task.evaluation[:count]])
        reference = np.load(_closure(task.score)["ref"])[:count].astype(np.float32)
        return {"ids": ids.astype(np.uint16), "lengths": lengths, "reference": reference}

    def feeds(self, data: Mapping[str, Array], name: str) -> Iterator[Arrays]:
        for ids, length in zip(data["ids"], data["lengths"], strict=True):
            mask = (np.arange(len(ids)) < length).astype(np.int64)[None]
            whole = ids.astype(np.int64)[None]
            yield {
                "input_ids": whole,
                "attention_mask": mask,
                "token_type_ids": np.zeros_like(whole),
            }

    def result(self, outputs: Sequence[Array]) -> Array:
        return outputs[0]

    def score(self, data: Mapping[str, Array], results: Sequence[Array]) -> dict[str, float]:
        means = [h[:, :n].mean(1) for h, n in zip(results, data["lengths"], strict=True)]
        found = np.concatenate(means).astype(np.float64)
        found /= np.linalg.norm(found, axis=-1, keepdims=True)
        cosine = (found * data["reference"]).sum(1)
        near, far = (v @ v.T - 9 * np.eye(len(v)) for v in (data["reference"], found))
        same = float((near.argmax(1) == far.argmax(1)).mean())
        return {
            "cosine": float(cosine.mean()),
            "worst_cosine": float(cosine.min()),
            "same_neighbour": same,
        }


class Lines:
    """Characters read from lines of text of many widths."""

    metric = "char_accuracy"
    samples = 150

    def pack(self, task: Any, count: int) -> Arrays:
        own = _closure(task.score)
        (name,) = task.sample
        count = min(count, len(task.evaluation))
        pixels = [np.rint((b[name][0] + 1) * 127.5) for b in task.evaluation[:count]]
        assert all((p == p[:1]).all() for p in pixels), "the lines have colours"
        return {
            "pixels": np.concatenate([p[0] for p in pixels], 1).astype(np.uint8),
            "widths": np.array([p.shape[-1] for p in pixels]),
            "characters": np.array(own["chars"]),
            "texts": np.array(own["truth"][:count]),
        }

    def feeds(self, data: Mapping[str, Array], name: str) -> Iterator[Arrays]:
        for end, width in zip(np.cumsum(data["widths"]), data["widths"], strict=True):
            grey = data["pixels"][:, end - width : end].astype(np.float32)[None, None]
            yield {name: np.repeat(grey / np.float32(127.5) - 1, 3, 1)}

    def result(self, outputs: Sequence[Array]) -> Array:
        return outputs[0][0].argmax(-1).astype(np.int32)

    def score(self, data: Mapping[str, Array], results: Sequence[Array]) -> dict[str, float]:
        errors = total = exact = 0
        known = [str(c) for c in data["characters"]]
        for found, truth in zip(results, (str(t) for t in data["texts"]), strict=True):
            kept = [c for k, c in enumerate(found) if c and (k == 0 or found[k - 1] != c)]
            text = "".join(known[c] for c in kept)
            errors, total, exact = (
                errors + _distance(text, truth),
                total + len(truth),
                exact + (text == truth),
            )
        return {"char_accuracy": 1 - errors / total, "exact": exact / len(results)}


class Stories:
    """Next tokens: the mean log probability of a text."""

    metric = "neg_nll"
    samples = 16

    def pack(self, task: Any, count: int) -> Arrays:
        ids = np.concatenate([b["ids"] for b in task.evaluation[:count]])
        reference = np.load(_closure(task.score)["ref"])[:count]
        return {"ids": ids.astype(np.uint16), "reference": reference.astype(np.uint16)}

    def feeds(self, data: Mapping[str, Array], name: str) -> Iterator[Arrays]:
        for ids in data["ids"]:
            yield {name: ids.astype(np.int64)[None]}

    def result(self, outputs: Sequence[Array]) -> Array:
        return outputs[0][0]

    def score(self, data: Mapping[str, Array], results: Sequence[Array]) -> dict[str, float]:
        right, nll = [], []
        for logits, ids, wanted in zip(results, data["ids"], data["reference"], strict=True):
            wide = logits.astype(np.float64)
            wide -= wide.max(-1, keepdims=True)
            wide -= np.log(np.exp(wide).sum(-1, keepdims=True))
            nll.append(-np.take_along_axis(wide[:-1], ids[1:, None].astype(int), -1))
            right.append(logits.argmax(-1) == wanted)
        mean = float(np.mean(nll))
        return {
            "neg_nll": -mean,
            "perplexity": float(np.exp(mean)),
            "same_token": float(np.mean(right)),
        }


TASKS: dict[str, Any] = {
    "resnet8": Images(),
    "minilm": Sentences(),
    "mobilenetv2": Pictures(),
    "ppocr": Lines(),
    "stories15m": Stories(),
}


def _closure(function: Any) -> dict[str, Any]:
    """The variables that a task's score keeps: labels, references, characters."""
    cells = function.__closure__ or ()
    return dict(zip(function.__code__.co_freevars, (c.cell_contents for c in cells), strict=True))


def _distance(one: str, other: str) -> int:
    """Insertions, deletions and replacements between two texts."""
    before = list(range(len(other) + 1))
    for i, x in enumerate(one):
        row = [i + 1]
        for j, y in enumerate(other):
            row.append(min(before[j] + (x != y), before[j + 1] + 1, row[j] + 1))
        before = row
    return before[-1]


def prepare(name: str, folder: Path, tasks: Any, count: int) -> None:
    """Write the model, the data and the CPU's results."""
    kind, task = TASKS[name], tasks.load(name)
    path = folder / f"{name}.bw"
    if not path.exists():
        bw.quantize(task.model, data=task.calibration).save(str(path))
    exe = bw.compile(str(path))
    reference = _closure(task.score).get("ref")
    if reference is not None and not reference.exists():
        task.score(lambda feed: list(exe.run(feed).values()))  # writes the reference
    data = kind.pack(task, count or kind.samples)
    data["input"] = np.array(next(iter(task.sample)))
    results = [
        kind.result(list(exe.run(feed).values())) for feed in kind.feeds(data, str(data["input"]))
    ]
    score = kind.score(data, results)
    data["digests"] = np.stack([_digest(found) for found in results])
    data["cpu_score"] = np.array(json.dumps(score))
    np.savez_compressed(folder / f"{name}.npz", **data)
    sizes = [f"{(folder / f'{name}{end}').stat().st_size / 1e6:.1f} MB" for end in (".bw", ".npz")]
    print(
        f"{name}: {len(results)} runs, model {sizes[0]}, data {sizes[1]}, CPU {score}", flush=True
    )


def _digest(found: Array) -> Array:
    """64 sums of a result's elements, to compare it without keeping it."""
    flat = found.astype(np.float64).reshape(-1)
    padded = np.concatenate([flat, np.zeros(-len(flat) % 64)])
    return padded.reshape(64, -1).sum(1)


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    kind, folder, count = TASKS[name], options.folder, options.runs
    with np.load(folder / f"{name}.npz") as file:
        data = dict(file)
    begin = time.perf_counter()
    path = str(folder / f"{name}.bw")
    exe = bw.compile(path, target=options.target, precision=options.precision or None)
    results, times = [], []
    for number, feed in enumerate(kind.feeds(data, str(data["input"]))):
        if count and number >= count:
            break
        start = time.perf_counter()
        outputs = list(exe.run(feed).values())
        times.append(time.perf_counter() - start)
        results.append(kind.result(outputs))
    row: dict[str, Any] = {"model": name, "runs": len(results), "metric": kind.metric}
    row["precision"] = options.precision or "f32"
    row["seconds"] = round(time.perf_counter() - begin, 2)
    row["first_s"], row["last_ms"] = round(times[0], 2), round(times[-1] * 1e3, 3)
    fallbacks: dict[str, int] = {}
    for step in getattr(exe.engine, "fallbacks", ()):
        why = f"{step.op.op}: {step.why.partition(';')[0]}"
        fallbacks[why] = fallbacks.get(why, 0) + 1
    row["fallbacks"] = fallbacks
    digests = np.stack([_digest(found) for found in results])
    kept = data["digests"][: len(digests)]
    row["same_results"] = float((digests == kept).all(1).mean())
    row["distance"] = float(
        np.linalg.norm(digests - kept) / max(float(np.linalg.norm(kept)), 1e-30)
    )
    if not count:
        row["cpu"], row["gpu"] = json.loads(str(data["cpu_score"])), kind.score(data, results)
        one, other = (float(row[side][kind.metric]) for side in ("cpu", "gpu"))
        row["difference"] = abs(one - other) / abs(one)
        row["right"] = row["difference"] <= WANTED
    return row


def layers(name: str, options: argparse.Namespace) -> None:
    """Print how much of every quantized value differs between the GPU and the CPU."""
    with np.load(options.folder / f"{name}.npz") as file:
        data = dict(file)
    graph = bw.load(str(options.folder / f"{name}.bw"))
    values = [v for node in graph.nodes if "quantize" in node.op for v in node.outputs[:1]]
    values = [v for v in values if v.dtype.is_integer]
    taps = tuple((f"layer {n} {v.name}", v) for n, v in enumerate(values))
    whole = graph.with_(outputs=(*taps, *graph.outputs))
    on_gpu, on_cpu = bw.compile(whole, target=options.target), bw.compile(whole)
    differs: dict[str, list[int]] = {}
    largest: dict[str, float] = {}
    for number, feed in enumerate(TASKS[name].feeds(data, str(data["input"]))):
        if number >= (options.runs or 1):
            break
        got, want = on_gpu.run(feed), on_cpu.run(feed)
        for key in want:
            count = differs.setdefault(key, [0, 0])
            apart = np.abs(got[key].astype(np.float64) - want[key].astype(np.float64))
            count[0] += int((apart > 0).sum())
            count[1] += apart.size
            largest[key] = max(largest.get(key, 0.0), float(apart.max(initial=0)))
    for key, (wrong, count) in differs.items():
        print(f"{name:12s} {key:50s} {wrong} of {count} differ, at most by {largest[key]:.3g}")


def show(row: Mapping[str, Any]) -> str:
    head = f"{row['model']:12s} {row['precision']:5s} {row['runs']:5d} runs"
    tail = f"same results {row['same_results']:.3f}, distance {row['distance']:.1e}"
    tail += f", {row['seconds']} s"
    if row["fallbacks"]:
        tail += f", on the CPU: {row['fallbacks']}"
    if "difference" not in row:
        return f"{head}  {tail}"
    metric = row["metric"]
    others = ", ".join(
        f"{key} {row['cpu'][key]:.4f} -> {row['gpu'][key]:.4f}"
        for key in row["cpu"]
        if key != metric
    )
    mark = "" if row["right"] else " WRONG"
    return (
        f"{head}  {metric} {row['cpu'][metric]:.6f} -> {row['gpu'][metric]:.6f} "
        f"({100 * row['difference']:.4f}%{mark})  {others}  {tail}"
    )


def load_tasks(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("yardstick_tasks", path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--prepare", action="store_true")
    parser.add_argument("--yardstick", type=Path, help="tasks.py of the yardstick")
    parser.add_argument("--samples", type=int, default=0, help="how many; 0: the task's choice")
    parser.add_argument("--runs", type=int, default=0, help="stop after so many runs, no score")
    parser.add_argument("--target", default="cuda")
    parser.add_argument("--precision", default="", help="of what is not quantized: mixed, ...")
    parser.add_argument("--layers", action="store_true", help="compare quantized values instead")
    parser.add_argument("--json", type=Path)
    options = parser.parse_intermixed_args()
    warnings.simplefilter("ignore")
    os.environ.setdefault("BITWRIGHT_TUNED", "off")
    if options.prepare:
        options.folder.mkdir(parents=True, exist_ok=True)
        for name in options.names or TASKS:
            prepare(name, options.folder, load_tasks(options.yardstick), options.samples)
        return 0
    rows = []
    for name in options.names or [n for n in TASKS if (options.folder / f"{n}.npz").exists()]:
        if options.layers:
            layers(name, options)
            continue
        try:
            rows.append(measure(name, options))
            print(show(rows[-1]), flush=True)
        except Exception as error:
            rows.append({"model": name, "failed": f"{type(error).__name__}: {error}"[:600]})
            print(f"{name:12s} {rows[-1]['failed']}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1))
    return 0 if rows and all(row.get("right", options.runs > 0) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
