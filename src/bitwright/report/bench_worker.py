"""A process that runs one engine, for `report.bench`.

    python -m bitwright.report.bench_worker ENGINE MODEL FEEDS OUTPUTS THREADS PRECISION TARGET

Each line on standard input is a command, `start` or `time`; each answer is one line of JSON. The
engine's own output goes to standard error. The engine is imported in `start`, so that ready time
and memory include its imports.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from bitwright import system

Feeds = Mapping[str, Any]
Run = Callable[[Feeds], dict[str, Any]]
CALLS = 3
"""Timed calls per round, after one that warms caches and threads; the fastest counts."""
WARMUP_CALLS = 10
"""Calls before memory is read, so that lazily allocated plans and arenas are included."""


def _bitwright(model: str, threads: int, precision: str, target: str = "cpu") -> tuple[str, Run]:
    from bitwright import __version__
    from bitwright.compiler import compile as compile_model

    if target != "cpu":
        return __version__, _on_device(compile_model(model, target=target, precision=precision).run)
    return __version__, compile_model(model, threads=threads, precision=precision).run


def _on_device(run: Run) -> Run:
    """A run whose inputs are on the device, and which waits for its end; arrays are its result."""
    import torch

    on_gpu = torch.cuda.is_available()
    given: dict[str, Any] = {}

    def call(feeds: Feeds) -> dict[str, Any]:
        for name, array in feeds.items():
            if name not in given:
                numbers = isinstance(array, np.ndarray) and array.dtype.kind in "biuf"
                tensor = torch.from_numpy(array) if numbers else array
                given[name] = tensor.cuda() if numbers and on_gpu else tensor
        found = run(given)
        if on_gpu:
            torch.cuda.synchronize()
        return _Arrays(found)

    return call


class _Arrays(dict[str, Any]):
    """Results that become arrays where they are read, which a timed run does not do."""

    def items(self) -> Any:
        for name, value in super().items():
            yield name, value.float().cpu().numpy() if hasattr(value, "cpu") else value


def _onnxruntime(model: str, threads: int, precision: str) -> tuple[str, Run]:
    import onnxruntime  # type: ignore[import-untyped]

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return onnxruntime.__version__, lambda feeds: dict(
        zip(names, session.run(names, dict(feeds)), strict=True)
    )


def _openvino(model: str, threads: int, precision: str) -> tuple[str, Run]:
    import openvino  # type: ignore[import-untyped]

    from bitwright.ops.core.opdef import Kind
    from bitwright.passes.precision.policy import policy

    core = openvino.Core()
    compiled = core.compile_model(
        core.read_model(model),
        "CPU",
        {
            "INFERENCE_NUM_THREADS": threads,
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": str(policy(precision).of_kind(Kind.COMPUTE)),
        },
    )
    request, outputs = compiled.create_infer_request(), compiled.outputs

    def run(feeds: Feeds) -> dict[str, Any]:
        found = request.infer(dict(feeds))
        return {output.get_any_name(): found[output] for output in outputs}

    return openvino.__version__, run


ENGINES: dict[str, Callable[[str, int, str], tuple[str, Run]]] = {
    "bitwright": _bitwright,
    "onnxruntime": _onnxruntime,
    "openvino": _openvino,
}


class Worker:
    """Prepares one engine, then times it on the same feeds on each command."""

    def __init__(
        self,
        engine: str,
        model: str,
        feeds: str,
        outputs: str,
        threads: str,
        precision: str,
        target: str = "cpu",
    ) -> None:
        self.engine, self.model, self.outputs = engine, model, outputs
        self.threads, self.precision, self.target = int(threads), precision, target
        with np.load(feeds) as archive:
            self.feeds = {name: archive[name] for name in archive.files}
        self.run: Run | None = None

    def start(self) -> dict[str, Any]:
        """Time from the model file to the first result, and memory after warm-up."""
        gc.collect()
        before, begin = system.resident_bytes(), time.perf_counter()
        make = ENGINES[self.engine]
        if make is _bitwright:
            make = partial(_bitwright, target=self.target)
        version, self.run = make(self.model, self.threads, self.precision)
        answer = self.run(self.feeds)
        ready = time.perf_counter() - begin
        for _ in range(WARMUP_CALLS):
            self.run(self.feeds)
        after = system.resident_bytes()
        kept: dict[str, Any] = {
            name: array
            for name, array in answer.items()
            if isinstance(array, np.ndarray) and array.dtype != object
        }
        np.savez(self.outputs, **kept)
        added = None if before is None or after is None else after - before
        return {"version": version, "ready_seconds": ready, "memory_bytes": added}

    def time(self) -> dict[str, Any]:
        assert self.run is not None
        self.run(self.feeds)
        seconds = []
        for _ in range(CALLS):
            begin = time.perf_counter()
            self.run(self.feeds)
            seconds.append(time.perf_counter() - begin)
        return {"seconds": min(seconds)}


def _fault(error: Exception, engine: str) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name == engine:
        return f"{engine} is not installed"
    text = str(error).strip() or "no message"
    return f"{type(error).__name__}: {text.splitlines()[0]}"


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = Worker(*sys.argv[1:])
    for line in sys.stdin:
        try:
            answer = {"start": worker.start, "time": worker.time}[line.strip()]()
        except Exception as error:  # an engine may raise anything
            answer = {"error": _fault(error, worker.engine)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
