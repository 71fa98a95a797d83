"""Random ONNX models: compiled for several targets, against the interpreter and ONNX Runtime.

    python tests/differential/differential.py --graphs 20000 --seed 0 --jobs 2

A model follows from its seed alone: `--seed 4711 --graphs 1 --save model.onnx` writes one. Every
model is compiled for one of the targets that run here, with one to three threads, and run with
several sizes, twice each: the second time memory holds rubbish before it begins, and the bits must
be the same. Results that differ from the interpreter's or ONNX Runtime's by more than a tolerance
are still right where noise of a rounding on inputs and constants moves the interpreter's own by as
much: a value at the edge between two quantized ones may fall to either side.

ONNX Runtime's u8 · s8 products saturate on processors without VNNI; there it is not asked about
models that hold such products (`product_is_exact` tries one).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper
from onnx_growing import Growing, noise
from onnx_models import bindings, random_model

import bitwright as bw
from bitwright.backends.cpu.backend import CpuBackend
from bitwright.backends.cpu.runtime.program import Program
from bitwright.errors import BitwrightError
from bitwright.ir.graph import Graph
from bitwright.ops.core.interpret import run
from bitwright.passes.manager import run_passes
from bitwright.pipeline import CPU, INFERENCE
from bitwright.target import named

Array = np.ndarray[Any, Any]
Results = dict[str, Array]
TARGETS = [name for name in ("host", "avx2", "sse2", "avx512") if named(name).runs_here()]
TOLERANCE, TOLERANCE_OF_HALVES = 1e-4, 1e-2
"""Of the largest number of a result."""
NOISES = 8
PER_WORKER = 400
"""Models that one process tries: each leaves its code in memory."""
SECONDS = 300
INTEGER_PRODUCTS = {"MatMulInteger", "ConvInteger", "QLinearConv", "QLinearMatMul"}
WRONG_WHEN_EMPTY = (
    *("Reduce", "Arg", "Global", "LSTM", "GRU", "RNN", "TopK", "Gemm", "MatMul", "Einsum"),
    *INTEGER_PRODUCTS,
)
"""How ops begin of which ONNX Runtime makes something else where they see no elements. It leaves
negative axes of reductions as they were, makes a mean of nothing 0, leaves sums of no terms unset,
forgets the factor of what a Gemm adds to a product of nothing, and ends the process on a
recurrent layer without rows."""


WINDOW = "the window does not fit"
"""What is said of a window larger than its padded image; ONNX Runtime rounds a negative number of
steps up to 0, and so makes a result of one window or none."""


class MismatchError(AssertionError):
    """Two sides that should agree do not."""


@cache
def product_is_exact() -> bool:
    """Whether ONNX Runtime's u8 · s8 product is right on this machine, where pairs may saturate."""
    x, w = np.full((4, 64), 255, np.uint8), np.full((64, 16), 127, np.int8)
    node = helper.make_node("MatMulInteger", ["x", "w"], ["y"])
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [node],
        "probe",
        [info("x", onnx.TensorProto.UINT8, x.shape)],
        [info("y", onnx.TensorProto.INT32, None)],
        [numpy_helper.from_array(w, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    found = Peer(model).run({"x": x})
    return found is not None and bool((found["y"] == 64 * 255 * 127).all())


class Peer:
    """ONNX Runtime without its own rewrites; it gives nothing where it refuses."""

    def __init__(self, model: onnx.ModelProto) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        self.names = [output.name for output in model.graph.output]
        self.has_max = any(node.op_type == "MaxPool" for node in model.graph.node)
        try:
            self.session = onnxruntime.InferenceSession(
                model.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:
            self.session, self.why = None, str(error)

    def run(self, feeds: Mapping[str, Array]) -> Results | None:
        if self.session is None:
            return None
        try:
            found = dict(zip(self.names, self.session.run(None, dict(feeds)), strict=True))
            return {name: self._without_lowest(array) for name, array in found.items()}
        except Exception as error:
            self.why = str(error)
            return None

    def _without_lowest(self, array: Array) -> Array:
        """A maximum of nothing but padding is the lowest number there, -inf by ONNX."""
        if not self.has_max or array.dtype.kind != "f":
            return array
        return np.where(array == np.finfo(array.dtype).min, -np.inf, array).astype(array.dtype)


@dataclass(frozen=True)
class Difference:
    """Where two results of one name lie too far apart."""

    name: str
    places: Array
    found: Array
    wanted: Array

    def __str__(self) -> str:
        at = tuple(int(i) for i in np.argwhere(self.places)[0])
        return (
            f"{self.name} {list(self.wanted.shape)}: {int(self.places.sum())} of"
            f" {self.places.size} differ, first at {list(at)}: {self.found[at]}"
            f" instead of {self.wanted[at]}"
        )


def compare(
    found: Results,
    wanted: Results,
    tolerance: float,
    spread: Mapping[str, Array] | None = None,
) -> list[Any]:
    """What differs; `spread` is how far noise moves each element."""
    differences: list[Any] = []
    for name, want in wanted.items():
        have, want = np.asarray(found[name]), np.asarray(want)
        if have.shape != want.shape or have.dtype != want.dtype:
            differences.append(f"{name}: {have.dtype}{have.shape}, not {want.dtype}{want.shape}")
            continue
        a, b = have.astype(np.float64), want.astype(np.float64)
        finite = np.isfinite(b)
        scale = max(1.0, float(np.abs(b[finite]).max(initial=0)))
        limit = tolerance * scale if want.dtype.kind == "f" else 0.0
        limits = np.full(b.shape, limit)
        if spread is not None:
            limits = limits + 4 * spread[name]
        with np.errstate(invalid="ignore"):
            off = ~(np.abs(a - b) <= limits)
        off &= ~((a == b) | (np.isnan(a) & np.isnan(b)))
        if off.any():
            differences.append(Difference(name, off, have, want))
    return differences


class Case:
    """One model and all sides that run it."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.growing: Growing = random_model(seed)
        self.model = self.growing.model()
        ops = {node.op_type for node in self.model.graph.node}
        exact = not ops & INTEGER_PRODUCTS or product_is_exact()
        self.peer = Peer(self.model) if exact else None
        self.target = TARGETS[seed % len(TARGETS)]
        self.threads = 1 + seed // len(TARGETS) % 3
        self.is_checked = False
        floats = {self.growing.real, *(v.dtype for v in self.growing.values)}
        halves = any(d.kind == "f" and d.itemsize == 2 for d in floats)
        self.tolerance = TOLERANCE_OF_HALVES if halves else TOLERANCE

    def check(self) -> str:
        """What came of it; a mismatch is raised."""
        if not self.model.graph.output:
            return "empty"
        runs = [self.growing.feeds(sizes) for sizes in bindings(self.growing)]
        try:
            graph = bw.load(self.model)
            program = self._program(graph)
        except BitwrightError as error:
            runs_there = self.peer is not None and self.peer.run(runs[0]) is not None
            if runs_there and WINDOW not in str(error):
                raise MismatchError(f"refused: {error}") from None
            return "refused"
        for feeds in runs:
            self._run(graph, program, feeds)
        return "checked" if self.is_checked else "refused to run"

    def _program(self, graph: Graph) -> Program:
        fused = run_passes(run_passes(graph, INFERENCE), CPU)
        return CpuBackend(named(self.target)).compile(fused, self.threads)

    def _run(self, graph: Graph, program: Program, feeds: Results) -> None:
        peer = None
        if self.peer is not None and not self._is_wrong_there(feeds):
            peer = self.peer.run(feeds)
        given = {value.name: feeds[value.name] for value in graph.inputs}
        try:
            wanted = run(graph, given)
        except BitwrightError as error:
            if peer is not None and WINDOW not in str(error):
                raise MismatchError(f"the interpreter refuses: {error}") from None
            try:
                program.run(given)
            except BitwrightError:
                return
            raise MismatchError(f"only the interpreter refuses: {error}") from None
        found = program.run(given)
        self.is_checked = True
        again = _rerun(program, given, found)
        for name, array in found.items():
            if array.tobytes() != again[name].tobytes():
                raise MismatchError(f"{name}: a second run over rubbish gives other bits")
        self._compare("compiled", found, wanted, given)
        if peer is not None:
            self._compare("ONNX Runtime", peer, wanted, given)

    def _is_wrong_there(self, feeds: Results) -> bool:
        ops = [node.op_type for node in self.model.graph.node]
        shapes = [*(v.shape for v in self.growing.values), *(a.shape for a in feeds.values())]
        return any(op.startswith(WRONG_WHEN_EMPTY) for op in ops) and any(0 in s for s in shapes)

    def _compare(self, side: str, found: Results, wanted: Results, feeds: Results) -> None:
        if not compare(found, wanted, self.tolerance):
            return
        differences = compare(found, wanted, self.tolerance, self._spread(feeds, wanted))
        if differences:
            raise MismatchError(f"{side}: {'; '.join(map(str, differences))}")

    def _spread(self, feeds: Results, wanted: Results) -> dict[str, Array]:
        """How far the interpreter's results move with noise on inputs and constants."""
        spread = {name: np.zeros(np.shape(array)) for name, array in wanted.items()}
        for seed in range(NOISES):
            graph = bw.load(self.growing.noisy(self.model, seed))
            moved = run(graph, {name: noise(array, seed) for name, array in feeds.items()})
            for name, array in moved.items():
                with np.errstate(invalid="ignore"):
                    apart = np.abs(array.astype(np.float64) - wanted[name].astype(np.float64))
                spread[name] = np.fmax(spread[name], apart)
        return spread


def _rerun(program: Program, feeds: Results, found: Results) -> Results:
    """A second run, with arena and results full of rubbish before it begins."""
    program._plans.arena.fill(255)
    out = {}
    for name, array in found.items():
        out[name] = np.empty_like(array)
        out[name].view(np.uint8).fill(255) if array.ndim and array.size else None
    return program.run(feeds, out)


def check(seed: int) -> str:
    """Compare one model; raises `MismatchError`, or whatever else went wrong."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Case(seed).check()


# many of them


def _worker(seeds: Sequence[int]) -> None:
    """Try models and say what came of each, a line before and a line behind."""
    for seed in seeds:
        print(json.dumps({"begin": seed}), flush=True)
        try:
            status, detail = check(seed), ""
        except MismatchError as error:
            status, detail = "mismatch", str(error)
        except Exception as error:
            status, detail = "exception", f"{type(error).__name__}: {error}"
        print(json.dumps({"end": seed, "status": status, "detail": detail}), flush=True)


def _tried(seeds: Sequence[int]) -> Iterator[tuple[int, str, str]]:
    """What came of each, from processes that may die on the way."""
    left = list(seeds)
    while left:
        some = left[:PER_WORKER]
        command = [sys.executable, __file__, "--worker", json.dumps(some)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert process.stdout is not None
        current, done = some[0], 0
        timer = threading.Timer(SECONDS, process.kill)
        timer.start()
        for line in process.stdout:
            said = json.loads(line)
            timer.cancel()
            timer = threading.Timer(SECONDS, process.kill)
            timer.start()
            if "begin" in said:
                current = said["begin"]
            else:
                done += 1
                yield said["end"], said["status"], said["detail"]
        timer.cancel()
        if process.wait() and done < len(some):
            yield current, "crash", f"the process ended with {process.returncode}"
            done += 1
        left = left[done:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--graphs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--save", type=Path, help="write the first model here, and stop")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        _worker(options.worker)
        return 0
    if options.save:
        options.save.write_bytes(Case(options.seed).model.SerializeToString())
        return 0
    os.environ.setdefault("BITWRIGHT_COMPILERS", "1")
    totals: Counter[str] = Counter()
    lock = threading.Lock()

    def work(seeds: Sequence[int]) -> None:
        for seed, status, detail in _tried(seeds):
            with lock:
                totals[status] += 1
                if status in ("mismatch", "exception", "crash"):
                    print(f"seed {seed}: {status}: {detail}", flush=True)
                if totals.total() % 500 == 0:
                    print(f"{totals.total()}: {dict(totals)}", flush=True)

    seeds = range(options.seed, options.seed + options.graphs)
    threads = [
        threading.Thread(target=work, args=(seeds[job :: options.jobs],))
        for job in range(options.jobs)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(dict(totals))
    return 1 if totals["mismatch"] or totals["exception"] or totals["crash"] else 0


if __name__ == "__main__":
    sys.exit(main())
