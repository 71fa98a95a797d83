"""Everything to measure on a GPU machine, in one call that fits ten minutes. Writes JSON and
prints tables.

    python benchmarks/gpu_session.py --out $OUT                  # on the GPU machine
    python benchmarks/gpu_session.py --out /tmp/gpu --tiny       # a dry run here, in Triton's
    interpreter

Parts (`--parts`), each within its share of `--seconds`:

    peaks     copy bandwidth, the library's products, accumulation bits of 8-bit floats
    models    whole models in each precision, beside torch.compile (gpu_compare.py)
    profile   the kernels of minilm at batch 64: microseconds, TB/s, share of the roof
    kernels   products with their epilogues at the sizes of the issue, against the library's bare
              bf16
    exact     integer products and convolutions with random shapes, against the CPU's bits
    products, rows, decode   benchmarks/gpu_kernels.py, gpu_rows.py and gpu_decode.py
    tests     the GPU tests of the repository, natively

Every part runs in a process of its own. A row that fails, hangs longer than `--row-seconds` or
breaks the CUDA context is recorded with its traceback; a new process goes on with the next row.
`gpu_session.json` is written after each row, `gpu_session.log` holds the output of all processes.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
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

Row = tuple[str, Callable[[], dict[str, Any]]]
"""A name, and the function that measures it."""
DEVICE = "cpu" if TINY else "cuda"
warnings.simplefilter("ignore")
PRODUCTS = ((4096, 2304, 768), (4096, 3072, 768), (4096, 768, 3072), (128, 1536, 384), (4096,) * 3)
ROWS = ((1, 8192, 8192), (1, 4096, 2048), (1, 8960, 1536))


def microseconds(call: Callable[[], Any], rounds: int = 30) -> float:
    """The median time of a call, by CUDA events; the L2 cache is overwritten before each."""
    if TINY:
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e6
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    for _ in range(5):
        call()
    torch.cuda.synchronize()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
    for begin, end in events:  # the host runs ahead, as in triton.testing.do_bench
        flush.zero_()
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return float(np.median([begin.elapsed_time(end) * 1e3 for begin, end in events]))


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


def rows_of_peaks(options: argparse.Namespace) -> Iterator[Row]:
    def measure() -> dict[str, Any]:
        found = peaks()
        return {} if found is None else dict(vars(found))

    yield "peaks", measure


def linear(kind: str, m: int, n: int, k: int, gelu: bool) -> Any:
    """An executable of x @ w + bias (and GELU), its input, and the result in f32."""
    torch.manual_seed(0)
    layers: list[Any] = [torch.nn.Linear(k, n)]
    module = torch.nn.Sequential(*layers, *([torch.nn.GELU()] if gelu else [])).eval()
    x = torch.randn(m, k)
    graph: Any = bw.from_torch(module, (x,))
    name = graph.inputs[0].name
    if kind != "bf16":
        graph = bw.quantize(graph, data=[{name: x.numpy()}], recipe=kind)
    exe = bw.compile(graph, target="cuda", precision="mixed_bf16")
    with torch.inference_mode():
        wanted = module.to(DEVICE)(x.to(DEVICE)).cpu().numpy()
    return exe, name, x, wanted


def rows_of_kernels(options: argparse.Namespace) -> Iterator[Row]:
    """Each kernel of one linear layer, by `Program.profile`, beside the library's bare bf16
    product."""
    library: dict[tuple[int, int, int], float] = {}

    def measure(m: int, n: int, k: int, kind: str, gelu: bool) -> dict[str, Any]:
        if (m, n, k) not in library:
            a = torch.randn(m, k, device=DEVICE, dtype=torch.bfloat16)
            w = torch.randn(n, k, device=DEVICE, dtype=torch.bfloat16)
            library[m, n, k] = replayed(lambda: a @ w.t())
        exe, name, x, wanted = linear(kind, m, n, k, gelu)
        found = exe.engine.profile({name: x.to(DEVICE)}, 1)
        steps = {_label(exe, timed.step): timed.seconds * 1e6 for timed in found.steps}
        (got,) = exe.run({name: x.numpy()}).values()
        return {
            "library_bf16_us": library[m, n, k],
            "steps_us": steps,
            "total_us": sum(steps.values()),
            "error_to_f32": _error(got, wanted),
        }

    for m, n, k in ((33, 48, 64), (1, 64, 32)) if TINY else (*PRODUCTS, *ROWS):
        kinds = [*options.recipes, *(options.weight_recipes if m == 1 else [])]
        for kind in ["bf16", *kinds]:
            for gelu in (False, True) if m > 1 else (False,):
                label = f"{m}x{n}x{k} {kind}{' gelu' if gelu else ''}"
                yield label, partial(measure, m, n, k, kind, gelu)


def _label(exe: Any, step: Any) -> str:
    return step.family if isinstance(step, KernelStep) else f"cpu {step.op.op}"


def _error(got: Any, wanted: Any) -> float:
    one, two = got.astype(np.float64), wanted.astype(np.float64)
    return float(np.linalg.norm(one - two) / max(np.linalg.norm(two), 1e-30))


def rows_of_profile(options: argparse.Namespace) -> Iterator[Row]:
    """Kernels of minilm at batch 64, for each recipe: time, bytes, share of the roof."""
    from bitwright.report.traffic import traffic

    def measure(recipe: str) -> dict[str, Any]:
        roof: GpuPeaks | None = peaks()
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
        for row in rows[:12]:
            print(f"  {row['us']:9.1f} us {row['TB/s']:6.2f} TB/s  {row['kernel']}  {row['node']}")
        total = sum(row["us"] for row in rows)
        return {"run_us": result.run_seconds * 1e6, "sum_us": total, "steps": rows}

    for recipe in ["", *options.recipes]:
        yield recipe or "16-bit", partial(measure, recipe)


WORKERS: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    "peaks": rows_of_peaks,
    "profile": rows_of_profile,
    "kernels": rows_of_kernels,
}


def work(options: argparse.Namespace) -> None:
    """The rows of one part that no process has begun yet, as lines of `rows.jsonl`."""
    path = options.out / "rows.jsonl"
    begun = {row["row"] for row in read_rows(path) if row["part"] == options.worker}

    def write(label: str, **facts: Any) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"part": options.worker, "row": label, **facts}, default=str))
            file.write("\n")

    for label, measure in WORKERS[options.worker](options):
        if label in begun:
            continue
        write(label, begun=True)
        begin = time.time()
        try:
            write(label, **measure(), seconds=time.time() - begin)
        except Exception:
            write(label, failed=traceback.format_exc()[-2500:], seconds=time.time() - begin)
            if not TINY:
                torch.cuda.synchronize()  # raises if the context is broken: a new process
        gc.collect()
        if not TINY:
            torch.cuda.empty_cache()


def read_rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# the process that starts the others


SHARES = {
    "peaks": 0.06,
    "models": 0.4,
    "profile": 0.12,
    "kernels": 0.15,
    "exact": 0.08,
    "products": 0.12,
    "rows": 0.1,
    "decode": 0.12,
    "tests": 0.25,
}
"""Of the seconds, at most; what a part leaves goes to those after it."""
SCRIPTS = {
    "models": ["gpu_compare.py"],
    "exact": ["gpu_exact.py", "20" if TINY else "1000"],
    "products": ["gpu_kernels.py", "products", "rows", "convs"],
    "rows": ["gpu_rows.py"],
    "decode": ["gpu_decode.py", "--kernels"],
}


class Session:
    """Runs parts in processes and collects what they write."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.end = time.time() + options.seconds
        self.results: dict[str, Any] = {"python": sys.version, "parts": {}}
        self.rows, self.log = options.out / "rows.jsonl", options.out / "gpu_session.log"
        for path in (self.rows, self.log):
            path.unlink(missing_ok=True)

    def run(self) -> None:
        for name in self.options.parts.split(","):
            begin = time.time()
            limit = min(SHARES[name] * self.options.seconds, self.end - begin)
            if limit < 5:
                self.results["parts"][name] = {"stopped": "no time left"}
                continue
            try:
                ended = self._part(name, limit)
            except Exception:
                ended = traceback.format_exc()[-2000:]
            found = self.results["parts"].setdefault(name, {})
            found |= {"seconds": time.time() - begin, "ended": ended}
            self._write()
            print(f"== {name}: {time.time() - begin:.0f} s, {ended}", flush=True)

    def _part(self, name: str, limit: float) -> str:
        if name in WORKERS:
            return self._worker(name, limit)
        if name == "tests":
            command = ["-m", "pytest", "-q", "--maxfail=40", "tests/backends/gpu"]
            command += ["-p", "no:cacheprovider", "--durations=10"]
            if importlib.util.find_spec("xdist") is not None:
                command += ["-n", "2" if TINY else "8"]
            command += ["-k", "one_op" if TINY else "not compile and not static"]
        else:
            script, *arguments = SCRIPTS[name]
            command = [str(ROOT / "benchmarks" / script), *arguments]
            command += ["--tiny"] if TINY else []
            if name == "models":
                command += ["--out", str(self.options.out), "--seconds", f"{0.7 * limit:.0f}"]
                command += ["--no-peers"] * (not self.options.peers)
        start = self.log.stat().st_size if self.log.exists() else 0
        ended = self._process(name, command, limit, limit)
        with self.log.open("rb") as file:
            file.seek(start)
            text = file.read().decode(errors="replace")
        self.results["parts"][name] = {"output": text[-6000:].splitlines()}
        print(text[-2500:], flush=True)
        return ended

    def _worker(self, name: str, limit: float) -> str:
        """Processes until one has been through all rows."""
        end = time.time() + limit
        options = self.options
        command = [str(Path(__file__)), "--worker", name, "--out", str(options.out)]
        command += ["--recipes", ",".join(options.recipes)]
        command += ["--weight-recipes", ",".join(options.weight_recipes)]
        command += ["--tiny"] * TINY + ["--no-peers"] * (not options.peers)
        ended = "no time left"
        for _ in range(12):
            if time.time() > end - 3:
                break
            before = len(read_rows(self.rows))
            ended = self._process(name, command, end - time.time(), options.row_seconds)
            rows = [row for row in read_rows(self.rows) if row["part"] == name]
            done = {row["row"] for row in rows if "begun" not in row}
            for row in rows:
                if "begun" in row and row["row"] not in done:
                    self._add({"part": name, "row": row["row"], "failed": f"process {ended}"})
            if ended == "done" or len(read_rows(self.rows)) == before:
                break
        found = [row for row in read_rows(self.rows) if row["part"] == name and "begun" not in row]
        self.results["parts"][name] = {"rows": found}
        for row in found:
            shown = {k: v for k, v in row.items() if k not in ("part", "steps")}
            print(name, json.dumps(shown)[:1200], flush=True)
        return ended

    def _add(self, row: dict[str, Any]) -> None:
        with self.rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def _process(self, name: str, command: list[str], limit: float, quiet: float) -> str:
        """Run until the end, `limit`, or `quiet` seconds without a new row; how it ended."""
        env = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
        env["PYTHONPATH"] = f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}"
        env.setdefault("BITWRIGHT_GPU_TUNE", "0" if name == "tests" else f"{0.5 * limit:.0f}")
        begin = changed = time.time()
        size = -1
        with self.log.open("ab") as log:
            log.write(f"\n==== {name}: {' '.join(command)}\n".encode())
            log.flush()
            process = subprocess.Popen(
                [sys.executable, *command],
                cwd=ROOT,
                env=env,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                while process.poll() is None:
                    time.sleep(0.2)
                    now, found = time.time(), self.rows.stat().st_size if self.rows.exists() else 0
                    if found != size:
                        size, changed = found, now
                        self._write()
                    if now - begin > limit:
                        return f"stopped after {limit:.0f} s"
                    if now - changed > quiet:
                        return f"stopped: a row took longer than {quiet:.0f} s"
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return "done" if process.returncode == 0 else f"ended with code {process.returncode}"

    def _write(self) -> None:
        rows = [row for row in read_rows(self.rows) if "begun" not in row]
        path = self.options.out / "gpu_session.json"
        path.write_text(json.dumps({**self.results, "rows": rows}, indent=1, default=str))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--parts", default=",".join(SHARES))
    parser.add_argument("--seconds", type=float, default=560)
    parser.add_argument("--row-seconds", type=float, default=100)
    parser.add_argument("--recipes", default="int8,f8-dynamic")
    parser.add_argument("--weight-recipes", default="w8,w4")
    parser.add_argument("--no-peers", dest="peers", action="store_false")
    parser.add_argument("--tiny", action="store_true", help="a dry run in the interpreter")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.recipes = [r for r in options.recipes.split(",") if r]
    options.weight_recipes = [r for r in options.weight_recipes.split(",") if r]
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.worker:
        print(vars(current_device().machine), "torch", torch.__version__, flush=True)
        work(options)
    else:
        Session(options).run()


if __name__ == "__main__":
    main()
