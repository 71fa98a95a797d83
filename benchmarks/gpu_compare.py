"""Whole models on one GPU: bitwright in each precision beside `torch.compile`, one table.

    python benchmarks/gpu_compare.py [MODEL:BATCH ...] [--recipes f8-dynamic,int8] [--no-peers]
    python benchmarks/gpu_compare.py --tiny          # a dry run in Triton's interpreter

Weights are random: read only times from it. Every engine is built, compiled and tuned in a process
of its own, all at the same time but for what runs on the GPU, which a lock divides. When all are
ready, they are timed in turns, one alone on the GPU at a time: medians of three rounds of
`triton.testing.do_bench`, which clears the L2 cache before each call. `error` is the distance to
the same weights in f32. `--seconds` bounds building; what is not ready by then is timed late.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]
TINY = "--tiny" in sys.argv
if TINY:
    os.environ["TRITON_INTERPRET"] = "1"
MODELS = ("minilm:1", "minilm:64", "bert:32", "resnet50:1", "resnet50:64")
ROUNDS = 3


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Holds the GPU against the other processes."""
    import fcntl

    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def our_engine(name: str, batch: int, recipe: str) -> tuple[Any, dict[str, Any]]:
    """An executable, and its inputs on the device."""
    import gpu_models
    import torch

    import bitwright as bw

    graph, feeds = gpu_models.graph_of(name, batch, recipe, TINY)
    precision = "mixed" if name == "resnet50" else "mixed_bf16"
    exe = bw.compile(graph, target="cuda", precision=precision)
    return exe, {key: torch.from_numpy(array).to(device()) for key, array in feeds.items()}


def peer_call(name: str, batch: int) -> Callable[[], Any]:
    """A call of PyTorch's compiled module: bf16, or f16 in channels_last for images."""
    import gpu_models
    import torch

    image = name == "resnet50"
    half = torch.float16 if image else torch.bfloat16
    module, inputs = gpu_models.model(name, batch, TINY)
    module = module.to(device(), half)
    given = [x.to(device(), half if x.is_floating_point() else x.dtype) for x in inputs]
    if image:
        module = module.to(memory_format=torch.channels_last)
        given = [x.to(memory_format=torch.channels_last) for x in given]
    if not TINY:
        module = torch.compile(module, mode="reduce-overhead", fullgraph=True)
    return lambda: module(*given)


def device() -> str:
    return "cpu" if TINY else "cuda"


def distance(name: str, batch: int, found: Any) -> float:
    """The relative distance of a result to that of f32."""
    import gpu_models
    import torch

    module, inputs = gpu_models.model(name, batch, TINY)
    wanted = module.to(device())(*(x.to(device()) for x in inputs))
    found = torch.as_tensor(found, device=device()).float()
    return float((found - wanted).norm() / wanted.norm())


def microseconds(call: Callable[[], Any]) -> float:
    if TINY:
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e6
    import triton

    found = triton.testing.do_bench(call, warmup=50, rep=150, return_mode="median")
    return float(found) * 1e3


def work(options: argparse.Namespace) -> None:
    """One engine: builds it, waits for the others, times it, writes its row."""
    import torch

    name, batch, label = options.worker.split(":")
    begin, folder = time.time(), options.folder
    exe, given = None, {}
    row: dict[str, Any] = {"model": name, "batch": int(batch), "engine": label}
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if label == "torch.compile":
            call = peer_call(name, int(batch))
            for _ in range(4):
                call()
        else:
            exe, given = our_engine(name, int(batch), "" if label == "16-bit" else label)
            call = lambda: next(iter(exe.run(given).values()))
            with alone(folder):
                for _ in range(3):
                    call()
            row["tuning_s"] = round(exe.engine.kernels.tuner.seconds_spent, 1)
            row["fallbacks"] = [f"{s.op.op}: {s.why}" for s in exe.engine.fallbacks]
        row["ready_s"] = round(time.time() - begin, 1)
        row["error"] = distance(name, int(batch), call())
        (folder / f"{options.worker.replace(':', '-')}.ready").touch()
        while len(list(folder.glob("*.ready"))) < options.count and time.time() < options.end:
            time.sleep(0.1)
        times = []
        for _ in range(ROUNDS):
            with alone(folder):
                times.append(microseconds(call))
            time.sleep(0.05)
        row["us"], row["rounds"] = sorted(times)[ROUNDS // 2], times
        if exe is not None and not TINY:
            with alone(folder):
                row["kernels"] = kernels(exe, given)
    (folder / f"{options.worker.replace(':', '-')}.json").write_text(json.dumps(row))


def kernels(exe: Any, given: dict[str, Any]) -> dict[str, tuple[int, float]]:
    """Per kernel family: calls, and the microseconds of all of them."""
    found: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for timed in exe.engine.profile(given, 2).steps:
        entry = found[getattr(timed.step, "family", "on the CPU")]
        entry[0] += 1
        entry[1] += timed.seconds * 1e6
    ordered = sorted(found.items(), key=lambda item: -item[1][1])
    return {name: (int(count), round(us, 1)) for name, (count, us) in ordered}


def compare(options: argparse.Namespace) -> None:
    """Starts a process per engine and prints the table."""
    labels = ["torch.compile"] * options.peers + ["16-bit", *options.recipes.split(",")]
    engines = [f"{model}:{label}" for model in options.models for label in labels if label]
    with tempfile.TemporaryDirectory() as folder:
        options.folder = Path(folder)
        end = time.time() + options.seconds
        shared = ["--folder", folder, "--count", str(len(engines)), "--end", str(end)]
        command = [sys.executable, str(Path(__file__)), *shared, *(["--tiny"] * TINY)]
        running = {
            engine: subprocess.Popen(
                [*command, "--worker", engine], stderr=subprocess.PIPE, text=True
            )
            for engine in engines
        }
        for engine, process in running.items():
            try:
                _, errors = process.communicate(timeout=max(end - time.time(), 0) + 60)
            except subprocess.TimeoutExpired:
                process.kill()
                errors = "it took too long"
            path = Path(folder) / f"{engine.replace(':', '-')}.json"
            if path.exists():
                show(json.loads(path.read_text()), options)
            else:
                reason = (errors or "no message").strip().splitlines()[-1]
                print(f"{engine:34s} failed: {reason}", flush=True)


def show(row: dict[str, Any], options: argparse.Namespace) -> None:
    rounds = ", ".join(f"{t:.1f}" for t in row["rounds"])
    print(
        f"{row['model']:10s} {row['batch']:4d}  {row['engine']:14s} {row['us']:9.1f} us"
        f"  ({rounds})  error {row['error']:.1e}  ready {row['ready_s']} s"
        + (f"  on the CPU: {row['fallbacks']}" if row.get("fallbacks") else ""),
        flush=True,
    )
    if options.out:
        with (options.out / "gpu_compare.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("models", nargs="*", default=None, help="MODEL:BATCH")
    parser.add_argument("--recipes", default="f8-dynamic,int8")
    parser.add_argument("--no-peers", dest="peers", action="store_false")
    parser.add_argument("--seconds", type=float, default=240, help="for building all engines")
    parser.add_argument("--out", type=Path, help="a folder for gpu_compare.jsonl")
    parser.add_argument("--tiny", action="store_true", help="a dry run in the interpreter")
    for hidden, kind in (("worker", str), ("folder", Path), ("count", int), ("end", float)):
        parser.add_argument(f"--{hidden}", type=kind, default=kind(), help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.models = options.models or (["minilm:1"] if TINY else MODELS)
    if options.worker:
        work(options)
    else:
        compare(options)


if __name__ == "__main__":
    main()
