"""Speed of a language model: prefill and decode at several contexts and batches.

    rows = bench_llm("model.gguf", contexts=(256, 2000), batches=(1, 4), threads=(1, 2))

A decoded token reads the panels of all matrices once, and the keys and values of its sequence:
`bytes_per_token` counts both per run, and `bandwidth_share` compares the rate with what this
machine reads at most with as many threads. Installed peers run the same tokens, one engine after
the other.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bitwright.errors import BitwrightError
from bitwright.llm.language_model import LanguageModel

PROMPT, DECODED = 255, 48
PEERS = ("llama.cpp",)


@dataclass
class Row:
    """One measurement: tokens per second over all sequences, the median of the rounds."""

    engine: str
    what: str
    threads: int
    context: int
    batch: int
    tokens_per_second: float
    bytes_per_token: float | None = None
    bandwidth_share: float | None = None


@dataclass
class Report:
    model: str
    rows: list[Row] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Runner(Protocol):
    """A model whose sequences are empty after `start`."""

    name: str

    def start(self, batch: int) -> None: ...

    def prefill(self, tokens: Sequence[int]) -> list[int]:
        """The same tokens for every sequence; the next token of each."""

    def step(self, tokens: Sequence[int]) -> list[int]:
        """One token per sequence."""


class BitwrightRunner:
    name = "bitwright"

    def __init__(self, model: Any, threads: int, context: int, batch: int) -> None:
        self.model = LanguageModel(model, threads=threads, context=context, slots=batch)
        self.decoder = self.model.engine.decoder
        self.batch = self.length = 0

    def start(self, batch: int) -> None:
        self.batch, self.length = batch, 0

    def prefill(self, tokens: Sequence[int]) -> list[int]:
        found = [self._rows([slot] * len(tokens), tokens, last=True) for slot in range(self.batch)]
        self.length += len(tokens)
        return [token for part in found for token in part]

    def step(self, tokens: Sequence[int]) -> list[int]:
        found = self._rows(range(self.batch), tokens, last=False)
        self.length += 1
        return found

    def _rows(self, slots: Sequence[int], tokens: Sequence[int], last: bool) -> list[int]:
        count = len(tokens)
        positions = np.arange(count) + self.length if last else np.full(count, self.length)
        rows = [count - 1] if last else range(count)
        logits = self.decoder.run(tokens, slots, positions, rows)
        return [int(token) for token in logits.argmax(axis=1)]

    def bytes_per_run(self) -> float:
        """Bytes of weights and of the caches of all sequences that a decoding run reads."""
        engine: Any = self.decoder.executable.engine
        constants = {
            view.buffer
            for step in engine.schedule.steps
            for name, view in getattr(step, "pointers", {}).items()
            if name == "w" and "gather" not in step.kernel and view.buffer.array is not None
        }
        weights = sum(buffer.array.nbytes for buffer in constants)
        slots = self.decoder.slots * self.decoder.context
        per_position = self.decoder.cache_bytes / slots
        return float(weights + per_position * self.length * self.batch)


class LlamaCppRunner:
    """One sequence in llama-cpp-python."""

    name = "llama.cpp"

    def __init__(self, path: str | Path, threads: int, context: int) -> None:
        library = importlib.import_module("llama_cpp")
        options = {"n_threads": threads, "n_threads_batch": threads, "n_batch": 512}
        self._model = library.Llama(str(path), n_ctx=context, verbose=False, **options)
        self._library = library

    def start(self, batch: int) -> None:
        self._model.reset()

    def prefill(self, tokens: Sequence[int]) -> list[int]:
        model = self._model
        model.eval(list(tokens))
        logits = self._library.llama_get_logits_ith(model.ctx, -1)
        return [int(np.ctypeslib.as_array(logits, (model.n_vocab(),)).argmax())]

    def step(self, tokens: Sequence[int]) -> list[int]:
        return self.prefill(tokens)


def bench_llm(
    model: Any,
    contexts: Sequence[int] = (256, 2000),
    batches: Sequence[int] = (1, 4),
    threads: Sequence[int] = (1,),
    rounds: int = 5,
    peers: Sequence[str] = PEERS,
    prompt: int = PROMPT,
    decoded: int = DECODED,
) -> Report:
    """Measures a model (a path or what `load_model` returned) and installed peers."""
    if min(*contexts, *batches, *threads, rounds, prompt, decoded) < 1:
        raise BitwrightError("contexts, batches, threads and rounds must be at least 1")
    report = Report(str(getattr(model, "name", model)))
    most = max(max(contexts) + decoded, prompt)
    for count in threads:
        cases = [("prefill", prompt, 1)]
        cases += [("decode", context, batch) for batch in batches for context in contexts]
        tokens: list[int] = []
        ours: Callable[..., Any] = partial(BitwrightRunner, batch=max(batches))
        for make in (ours, *_peers(model, peers)):
            try:
                runner = make(model, count, most)
            except (ImportError, ValueError):  # a peer that is not installed or refuses the file
                continue
            tokens = tokens or _tokens(runner, most)
            report.rows += [
                _measured(runner, case, count, tokens, rounds, decoded)
                for case in cases
                if case[2] == 1 or runner.name == "bitwright"
            ]
            del runner  # threads of two engines would wait for the same cores
    return report


def _tokens(runner: BitwrightRunner, count: int) -> list[int]:
    vocabulary = runner.decoder.vocabulary
    return [int(t) for t in np.random.default_rng(0).integers(0, vocabulary, count)]


def _peers(model: Any, names: Sequence[str]) -> list[Callable[..., Any]]:
    """The peers that may read this file."""
    reads = str(model).endswith(".gguf")
    return [LlamaCppRunner] if reads and "llama.cpp" in names else []


def _measured(
    runner: Any,
    case: tuple[str, int, int],
    threads: int,
    tokens: Sequence[int],
    rounds: int,
    decoded: int,
) -> Row:
    """One case of one engine."""
    what, context, batch = case
    times = []
    nbytes = None
    for _ in range(rounds):
        runner.start(batch)
        if what == "prefill":
            times.append(_timed(partial(runner.prefill, tokens[:context])) / context)
            continue
        times.append(_decode(runner, tokens[:context], decoded) / batch)
        if runner.name == "bitwright":
            nbytes = runner.bytes_per_run() / batch
    rate = 1 / statistics.median(times)
    share = None if nbytes is None else rate * nbytes / _bandwidth(threads)
    return Row(runner.name, what, threads, context, batch, rate, nbytes, share)


def _timed(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _decode(runner: Runner, tokens: Sequence[int], count: int) -> float:
    """Seconds per run of one token per sequence, behind these tokens."""
    found = runner.prefill(tokens)

    def steps() -> None:
        nonlocal found
        for _ in range(count):
            found = runner.step(found)

    return _timed(steps) / count


def _bandwidth(threads: int) -> float:
    """Bytes per second that this machine reads from memory at most."""
    peaks = importlib.import_module("bitwright.backends.cpu.profile.peaks")
    return float(peaks.measure(threads).memory)
