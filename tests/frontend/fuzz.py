"""Feeds damaged models to `bitwright.load`, and what still loads to the interpreter.

    python tests/frontend/fuzz.py --count 20000 --official

For any file the result must be a graph or a BitwrightError, in bounded time and memory, without
access outside the model's folder. A worker process with a memory limit runs one case after another
and reports the results; this process supervises it, and starts another worker if it dies or hangs.
A case depends only on the seeds, the run's number and its own number, so it is reproducible:
`--only N` shows one case, `--keep DIR` writes the files of those that failed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from fuzz_microsoft_seeds import microsoft_seeds
from fuzz_mutations import SECRET, misplaced, mutate
from fuzz_seeds import Seed, official_seeds, own_seeds

import bitwright
from bitwright.errors import BitwrightError
from bitwright.ir import Graph, TensorType
from bitwright.ir.dim import evaluate
from bitwright.ops.core.interpret import run

MEMORY = 2 << 30
TENSOR_BYTES = 64 << 20
MAX_INPUT = 100_000
LOAD_SECONDS, RUN_SECONDS = 20.0, 3.0
"""Of computing, however long that takes on a busy machine."""
FAILURES = ("exception", "crash", "hang", "memory", "read outside")
"""`refused by surprise` is none: an error of the package, but made from one of Python's."""


class BudgetError(BaseException):
    """The interpreter has exceeded its time; not caught as an ordinary error."""


@dataclass(frozen=True)
class Case:
    number: int
    what: str
    seed: Seed
    prepare: Callable[[Path], Any] | None = None
    forbidden: bool = False
    """Loading it at all would mean a read where nothing may be read."""

    def write(self, folder: Path) -> Path:
        """Write the files; the parent folder contains a secret."""
        (folder / "secret.bin").write_bytes(SECRET)
        inside = folder / "model"
        inside.mkdir()
        for name, data in self.seed.beside.items():
            (inside / name).write_bytes(data)
        if self.prepare:
            self.prepare(inside)
        path = inside / self.seed.file
        path.write_bytes(self.seed.data)
        return path


def make_case(seeds: list[Seed], run_number: int, number: int) -> Case:
    random = Random(f"{run_number}/{number}")
    if random.random() < 0.05:
        return Case(number, *misplaced(random))
    seed = random.choice(seeds)
    what, damaged = mutate(seed, random)
    return Case(number, f"{seed.name}: {what}", damaged)


# the worker


def _hang() -> None:
    while True:
        time.sleep(60)


def _eat() -> None:
    bytearray(MEMORY + (1 << 30))


SABOTAGE: dict[str, Callable[[], Any]] = {
    "crash": os.abort,
    "hang": _hang,
    "memory": _eat,
    "exception": lambda: {}["key"],
}
"""What a case does that has one of these file names, so that the watcher can be tested."""


def load_case(case: Case, path: Path) -> Graph:
    if case.seed.file in SABOTAGE:
        SABOTAGE[case.seed.file]()
    alone = case.seed.file.endswith(".onnx") and not case.prepare and not case.seed.beside
    return bitwright.load(case.seed.data if alone and case.number % 4 else path)


def try_case(case: Case, folder: Path, phase: Callable[[str], None]) -> tuple[str, str]:
    """The status of a case, and details of a failure."""
    path = case.write(folder)
    phase("load")
    try:
        graph = load_case(case, path)
    except MemoryError:
        return "memory", case.what
    except BitwrightError as error:
        if "not enough memory" in str(error):
            return "memory", str(error)
        foreign = error.__cause__ and not isinstance(error.__cause__, BitwrightError)
        return ("refused by surprise", str(error)) if foreign else ("refused", "")
    except Exception:
        return "exception", traceback.format_exc()
    if case.forbidden or holds_secret(graph):
        return "read outside", case.what
    feeds = inputs_of(graph)
    if feeds is None:
        return "loaded", ""
    phase("run")
    try:
        signal.setitimer(signal.ITIMER_PROF, RUN_SECONDS)
        run(graph, feeds)
    except BitwrightError:
        return "run refused", ""
    except BudgetError:
        return "run out of time", ""
    except Exception:
        return "exception", traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return "ran", ""


def holds_secret(graph: Graph) -> bool:
    values = [node.attrs.get("value") for _, node in graph.walk()]
    arrays = [x for x in values if isinstance(x, np.ndarray) and x.dtype != object and x.nbytes > 8]
    return any(x.nbytes <= len(SECRET) and x.tobytes() in SECRET for x in arrays)


def inputs_of(graph: Graph) -> dict[str, Any] | None:
    """Small inputs for every tensor; None if there are other kinds or sizes are large."""
    feeds: dict[str, Any] = {}
    generator = np.random.default_rng(0)
    for value in graph.inputs:
        type_ = value.type
        if not isinstance(type_, TensorType):
            return None
        symbols = {symbol.name: 2 for symbol in type_.symbols}
        shape = [evaluate(size, symbols) for size in type_.shape]
        if min(shape, default=0) < 0 or math.prod(max(size, 1) for size in shape) > MAX_INPUT:
            return None
        numbers = generator.integers(0, 2, shape)
        feeds[value.name] = (
            np.full(shape, "a", object)
            if type_.dtype.name == "string"
            else numbers.astype(np.int8).astype(type_.dtype.numpy)
        )
    return feeds


def work(seeds_folder: Path, run_number: int, first: int, stop: int) -> None:
    """Run cases one after another; each line of output reports the progress."""
    seeds = read_seeds(seeds_folder)
    warnings.simplefilter("ignore")
    os.environ["BITWRIGHT_MAX_TENSOR_BYTES"] = str(TENSOR_BYTES)
    say = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of other code is not part of the protocol
    limit_memory()

    def out_of_time(*_: Any) -> None:
        raise BudgetError

    signal.signal(signal.SIGPROF, out_of_time)
    for number in range(first, stop):
        case = make_case(seeds, run_number, number)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with tempfile.TemporaryDirectory() as folder:
            status, detail = try_case(
                case, Path(folder), lambda name, n=number: say.write(f"{n} {name}\n")
            )
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        if grown << 10 > MEMORY // 2:
            status, detail = "memory", f"{grown >> 10} MB: {case.what}"
        say.write(f"{number} done {json.dumps([status, detail])}\n")


def limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


# the supervisor


def write_seeds(seeds: list[Seed], folder: Path) -> None:
    for index, seed in enumerate(seeds):
        own = folder / f"{index:05}"
        own.mkdir()
        (own / "data").write_bytes(seed.data)
        (own / "name").write_text(json.dumps([seed.name, seed.file]))
        for name, data in seed.beside.items():
            (own / f"beside-{name}").write_bytes(data)


def read_seeds(folder: Path) -> list[Seed]:
    found = []
    for own in sorted(folder.iterdir()):
        name, file = json.loads((own / "name").read_text())
        beside = {p.name.removeprefix("beside-"): p.read_bytes() for p in own.glob("beside-*")}
        found.append(Seed(name, (own / "data").read_bytes(), file, beside))
    return found


class Worker:
    def __init__(self, seeds: Path, run_number: int, first: int, stop: int) -> None:
        numbers = [str(n) for n in (run_number, first, stop)]
        command = [sys.executable, __file__, "--worker", str(seeds), *numbers]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert self.process.stdout
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.process.stdout, selectors.EVENT_READ)
        self.buffer = b""

    def line(self, seconds: float) -> str | None:
        """The next line; "" if the worker has ended, None if it exceeds the limits of CPU time or
        of idle time. Waiting on a busy machine does not count."""
        assert self.process.stdout
        start = self.cpu_seconds()[0]
        while b"\n" not in self.buffer:
            before, _ = self.cpu_seconds()
            if not self.selector.select(seconds):
                used, running = self.cpu_seconds()
                if used - start > seconds or (used - before < seconds / 100 and not running):
                    return None
                continue
            piece = os.read(self.process.stdout.fileno(), 1 << 16)
            if not piece:
                return ""
            self.buffer += piece
        text, _, self.buffer = self.buffer.partition(b"\n")
        return text.decode()

    def cpu_seconds(self) -> tuple[float, bool]:
        """The CPU time of the worker, and whether it is runnable."""
        text = Path(f"/proc/{self.process.pid}/stat").read_text()
        state, *fields = text.rpartition(")")[2].split()
        ticks = int(fields[10]) + int(fields[11])
        return ticks / os.sysconf("SC_CLK_TCK"), state == "R"

    def end(self, gone: bool = False) -> int:
        """The exit status of the worker, after a short wait if it has just ended."""
        if gone:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
        self.process.kill()
        self.selector.close()
        assert self.process.stdout
        self.process.stdout.close()
        return self.process.wait()


def results(
    seeds: Path, run_number: int, first: int, stop: int, patience: float
) -> Iterator[tuple[int, str, str]]:
    """Number, status and detail of each case, also if workers die."""
    worker = Worker(seeds, run_number, first, stop)
    number, phase = first, "start"
    while number < stop:
        line = worker.line(patience if phase != "start" else 120)
        if line:
            at, phase, *rest = line.split(" ", 2)
            if phase == "done":
                status, detail = json.loads(rest[0])
                yield int(at), status, detail
                number = int(at) + 1
            continue
        code = worker.end(gone=line == "")
        status = "hang" if line is None else "crash"
        yield number, status, f"while it was to {phase} (exit status {code})"
        number, phase = number + 1, "start"
        worker = Worker(seeds, run_number, number, stop)
    worker.end()


def fuzz(
    seeds: list[Seed],
    run_number: int,
    first: int,
    count: int,
    on_trouble: Callable[[Case, str, str], None],
    on_progress: Callable[[int, Counter[str]], None] = lambda number, totals: None,
    patience: float = LOAD_SECONDS,
) -> Counter[str]:
    """The number of cases by status; `on_trouble` is called for failures."""
    totals: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        write_seeds(seeds, Path(folder))
        stop = first + count
        for number, status, detail in results(Path(folder), run_number, first, stop, patience):
            totals[status] += 1
            if detail:
                on_trouble(make_case(seeds, run_number, number), status, detail)
            on_progress(number, totals)
    return totals


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--count", type=int, default=2000, help="how many models to try")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--run", type=int, default=0, help="another number gives other cases")
    parser.add_argument("--official", action="store_true", help="damage official ONNX cases too")
    parser.add_argument("--keep", type=Path, help="folder for the files of cases that failed")
    parser.add_argument("--only", type=int, help="try one case here, without a worker")
    options = parser.parse_args()
    seeds = own_seeds() + microsoft_seeds()
    if options.official:
        seeds = own_seeds() * 30 + microsoft_seeds() * 10 + official_seeds()
    if options.only is not None:
        case = make_case(seeds, options.run, options.only)
        print(case.what)
        signal.signal(signal.SIGPROF, signal.default_int_handler)
        with tempfile.TemporaryDirectory() as folder:
            print(*try_case(case, Path(folder), print))
        return 0

    def report(case: Case, status: str, detail: str) -> None:
        print(f"{status}: case {case.number} ({case.what})\n{detail}", flush=True)
        if options.keep and status in FAILURES:
            own = options.keep / f"{options.run}-{case.number}"
            own.mkdir(parents=True, exist_ok=True)
            case.write(own)

    def progress(number: int, totals: Counter[str]) -> None:
        if (number + 1) % 1000 == 0:
            print(f"{number + 1}: {dict(totals)}", flush=True)

    start = time.monotonic()
    totals = fuzz(seeds, options.run, options.first, options.count, report, progress)
    bad = sum(totals[status] for status in FAILURES)
    seconds = time.monotonic() - start
    print(f"{totals.total()} models of {len(seeds)} seeds in {seconds:.0f} s: {dict(totals)}")
    print(f"{bad} failures")
    return 1 if bad else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(Path(sys.argv[2]), *(int(text) for text in sys.argv[3:6]))
    else:
        sys.exit(main())
