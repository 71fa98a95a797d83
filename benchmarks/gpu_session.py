"""Everything to measure on a GPU machine, in one call that fits ten minutes. Writes JSON and
prints tables.

    python benchmarks/gpu_session.py --out $OUT                  # on the GPU machine
    python benchmarks/gpu_session.py --out /tmp/gpu --tiny       # a dry run here, in Triton's
    interpreter

Parts (`--parts peaks,tests,kernels,models,profile`), each within its share of `--seconds`; a part
that fails is reported
and the others go on:

    peaks     copy bandwidth, the library's products, accumulation bits of 8-bit floats
    tests     the GPU tests of the repository, natively
    kernels   products with their epilogues at the sizes of the issue, against the library's bare
    bf16
    models    whole models in each precision, against PyTorch (eager and torch.compile), by CUDA
    events
    profile   the kernels of minilm at batch 64: microseconds, TB/s, share of the roof
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]
TINY = "--tiny" in sys.argv
if TINY:
    os.environ["TRITON_INTERPRET"] = "1"

import gpu_models  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402

import bitwright as bw  # noqa: E402
from bitwright.backends.gpu.profile.peaks import GpuPeaks, peaks  # noqa: E402
from bitwright.backends.gpu.runtime.device import current_device  # noqa: E402
from bitwright.lir.schedule import KernelStep  # noqa: E402

DEVICE = "cpu" if TINY else "cuda"
warnings.simplefilter("ignore")
PRODUCTS = ((4096, 2304, 768), (4096, 3072, 768), (4096, 768, 3072), (128, 1536, 384), (4096,) * 3)
ROWS = ((1, 8192, 8192), (1, 4096, 2048), (1, 8960, 1536))
MODELS = (("minilm", 1), ("minilm", 64), ("bert", 32), ("resnet50", 1), ("resnet50", 64))


def microseconds(call: Callable[[], Any], rounds: int = 30) -> float:
    """The median time of a call, by CUDA events; the L2 cache is overwritten before each."""
    if TINY:
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e6
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    for _ in range(5):
        call()
    times = []
    for _ in range(rounds):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return float(np.median(times))


def replayed(call: Callable[[], Any]) -> float:
    """`microseconds` of a call as one CUDA graph."""
    if TINY:
        return microseconds(call)
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return microseconds(graph.replay)


def part_peaks(options: argparse.Namespace) -> Any:
    found = peaks()
    return None if found is None else vars(found)


def part_tests(options: argparse.Namespace) -> Any:
    """The repository's GPU tests; the last lines of pytest."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--maxfail=20", "tests/backends/gpu"]
    command += ["-p", "no:cacheprovider"]
    if TINY:
        command += ["-k", "one_op"]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "BITWRIGHT_GPU_TUNE": "0"}
    limit = options.seconds * 0.3
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=limit, check=False
        )
        text = done.stdout + done.stderr
    except subprocess.TimeoutExpired as error:
        text = f"stopped after {limit:.0f} s\n{(error.stdout or b'').decode()[-3000:]}"
    (options.out / "tests.txt").write_text(text)
    return text.strip().splitlines()[-12:]


def linear(kind: str, m: int, n: int, k: int, gelu: bool) -> Any:
    """An executable of x @ w + bias (and GELU), and its input."""
    torch.manual_seed(0)
    layers: list[Any] = [torch.nn.Linear(k, n)]
    module = torch.nn.Sequential(*layers, *([torch.nn.GELU()] if gelu else [])).eval()
    x = torch.randn(m, k)
    graph: Any = bw.from_torch(module, (x,))
    name = graph.inputs[0].name
    if kind != "bf16":
        graph = bw.quantize(graph, data=[{name: x.numpy()}], recipe=kind)
    exe = bw.compile(graph, target="cuda", precision="mixed_bf16")
    return exe, name, x


def part_kernels(options: argparse.Namespace) -> Any:
    """Each kernel of one linear layer, by `Program.profile`, beside the library's bare bf16
    product."""
    rows = []
    shapes = ((33, 48, 64), (1, 64, 32)) if TINY else (*PRODUCTS, *ROWS)
    begin = time.time()
    for m, n, k in shapes:
        a = torch.randn(m, k, device=DEVICE, dtype=torch.bfloat16)
        w = torch.randn(n, k, device=DEVICE, dtype=torch.bfloat16)
        library = replayed(lambda a=a, w=w: a @ w.t())
        kinds = [*options.recipes, *(options.weight_recipes if m == 1 else [])]
        for kind in ["bf16", *kinds]:
            for gelu in (False, True) if m > 1 else (False,):
                if time.time() - begin > options.seconds * 0.3:
                    rows.append({"stopped": "no time left"})
                    return rows
                row: dict[str, Any] = {"m": m, "n": n, "k": k, "kind": kind, "gelu": gelu}
                row["library_bf16_us"] = library
                try:
                    exe, name, x = linear(kind, m, n, k, gelu)
                    found = exe.engine.profile({name: x.to(DEVICE)}, 1)
                    row["steps_us"] = {_label(exe, t.step): t.seconds * 1e6 for t in found.steps}
                    row["total_us"] = sum(row["steps_us"].values())
                    wanted = bw.compile(exe.graph, target="cpu").run({name: x.numpy()})
                    got = exe.run({name: x.numpy()})
                    row["error"] = max(_error(got[key], wanted[key]) for key in wanted)
                except Exception as error:
                    row["failed"] = f"{type(error).__name__}: {str(error)[:200]}"
                rows.append(row)
                print("kernel", json.dumps(row), flush=True)
    return rows


def _label(exe: Any, step: Any) -> str:
    return step.family if isinstance(step, KernelStep) else f"cpu {step.op.op}"


def _error(got: Any, wanted: Any) -> float:
    one, two = got.astype(np.float64), wanted.astype(np.float64)
    return float(np.linalg.norm(one - two) / max(np.linalg.norm(two), 1e-30))


def engines(name: str, batch: int, options: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """A function that makes a callable per engine."""
    image = name == "resnet50"
    half = torch.float16 if image else torch.bfloat16
    precision = "mixed" if image else "mixed_bf16"

    def ours(recipe: str) -> Callable[[], Any]:
        graph, feeds = gpu_models.graph_of(name, batch, recipe, TINY)
        exe = bw.compile(graph, target="cuda", precision=precision)
        given = {key: torch.from_numpy(array).to(DEVICE) for key, array in feeds.items()}
        return lambda: exe.run(given)

    def theirs(compiled: bool) -> Callable[[], Any]:
        module, inputs = gpu_models.model(name, batch, TINY)
        module = module.to(DEVICE, half)
        given = tuple(x.to(DEVICE, half if x.is_floating_point() else x.dtype) for x in inputs)
        if image:
            module = module.to(memory_format=torch.channels_last)
            given = tuple(x.to(memory_format=torch.channels_last) for x in given)
        if compiled:
            module = torch.compile(module, mode="reduce-overhead", fullgraph=True)

        def call() -> Any:
            with torch.inference_mode():
                return module(*given)

        return call

    found: dict[str, Callable[[], Any]] = {"bitwright 16-bit": lambda: ours("")}
    found |= {f"bitwright {r}": lambda r=r: ours(r) for r in options.recipes}
    if options.peers:
        found |= {"torch eager": lambda: theirs(False)}
        if not TINY:
            found |= {"torch compile": lambda: theirs(True)}
    return found


def part_models(options: argparse.Namespace) -> Any:
    rows = []
    begin = time.time()
    for name, batch in MODELS[:2] if TINY else MODELS:
        for label, make in engines(name, min(batch, 2) if TINY else batch, options).items():
            if time.time() - begin > options.seconds * 0.45:
                rows.append({"stopped": "no time left"})
                return rows
            row: dict[str, Any] = {"model": name, "batch": batch, "engine": label}
            start = time.time()
            try:
                call = make()
                call()
                row["ready_s"] = time.time() - start
                row["us"] = microseconds(call)
            except Exception as error:
                row["failed"] = f"{type(error).__name__}: {str(error)[:300]}"
            rows.append(row)
            print("model", json.dumps(row), flush=True)
            torch._dynamo.reset()
            if not TINY:
                torch.cuda.empty_cache()
    return rows


def part_profile(options: argparse.Namespace) -> Any:
    """Kernels of minilm at batch 64, for each recipe: time, bytes, share of the roof."""
    from bitwright.report.traffic import traffic

    roof: GpuPeaks | None = peaks()
    found: dict[str, Any] = {}
    for recipe in ["", *options.recipes]:
        graph, feeds = gpu_models.graph_of("minilm", 2 if TINY else 64, recipe, TINY)
        exe = bw.compile(graph, target="cuda", precision="mixed_bf16")
        given = {key: torch.from_numpy(array).to(DEVICE) for key, array in feeds.items()}
        result = exe.engine.profile(given, 2)
        rows = []
        for timed in result.steps:
            moved = traffic(timed.step, result.bindings, False).nbytes
            row = {"kernel": _label(exe, timed.step), "node": timed.step.node}
            row |= {"us": timed.seconds * 1e6, "TB/s": moved / timed.seconds / 1e12}
            if roof is not None:
                row["bandwidth_share"] = moved / roof.bytes_per_second / timed.seconds
            rows.append(row)
        rows.sort(key=lambda row: -row["us"])
        total = sum(row["us"] for row in rows)
        found[recipe or "16-bit"] = {
            "run_us": result.run_seconds * 1e6,
            "sum_us": total,
            "steps": rows,
        }
        print(f"profile {recipe or '16-bit'}: {total:.0f} us in {len(rows)} steps", flush=True)
        for row in rows[:12]:
            print(f"  {row['us']:9.1f} us {row['TB/s']:6.2f} TB/s  {row['kernel']}  {row['node']}")
    return found


PARTS = {
    "peaks": part_peaks,
    "kernels": part_kernels,
    "models": part_models,
    "profile": part_profile,
    "tests": part_tests,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--seconds", type=float, default=560)
    parser.add_argument("--recipes", default="int8,f8-dynamic")
    parser.add_argument("--weight-recipes", default="w8,w4")
    parser.add_argument("--no-peers", dest="peers", action="store_false")
    parser.add_argument("--tiny", action="store_true", help="a dry run in the interpreter")
    options = parser.parse_args()
    options.recipes = [r for r in options.recipes.split(",") if r]
    options.weight_recipes = [r for r in options.weight_recipes.split(",") if r]
    options.out.mkdir(parents=True, exist_ok=True)
    device = current_device().machine
    results: dict[str, Any] = {"device": vars(device), "torch": torch.__version__}
    for name in options.parts.split(","):
        begin = time.time()
        try:
            results[name] = PARTS[name](options)
        except Exception:
            results[name] = {"failed": traceback.format_exc()[-2000:]}
            print(f"part {name} failed:\n{traceback.format_exc()}", flush=True)
        results[f"{name}_seconds"] = time.time() - begin
        path = options.out / "gpu_session.json"
        path.write_text(json.dumps(results, indent=1, default=str))
        print(f"== {name}: {time.time() - begin:.0f} s", flush=True)
    if "tests" in results:
        print("\n".join(map(str, results["tests"])))


if __name__ == "__main__":
    main()
