"""StatsFile: saves and restores the state of a CalibrationRun.

An .npz of plain arrays: `header` is JSON (model, data, counts, random state), then for point i and
its window j

    i.ends          [4, channels]: low and high of all batches, low and high of the even batches
    i.j.first, i.j.rows, i.j.gram, i.j.total, i.j.waiting
    held.k.name     the batches that choices are checked on
    out.k.name      batches that were held out

Digests tie a file to one model and one sequence of batches: with other data some batches would be
counted twice.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np

from bitwright.errors import CalibrationError, ParseError
from bitwright.ir.arrays import Array
from bitwright.ir.calibration import CalibrationRecord
from bitwright.ir.container import require_writable, write_atomically
from bitwright.ir.dtype import dtype
from bitwright.ir.graph import Graph
from bitwright.ir.payload import blob_key
from bitwright.ir.printer import Printer
from bitwright.quant.calibration.model_outputs import Channels
from bitwright.quant.calibration.ranges import MAGIC as RANGES_MAGIC
from bitwright.quant.calibration.ranges import Ranges
from bitwright.quant.calibration.stats import CalibrationStats, Sample, StatsBuilder
from bitwright.quant.data.batches import Batch
from bitwright.quant.model.recipe import NO_DATA_HINT

FORMAT = 3
_PARTS = ("first", "rows", "gram", "total", "waiting")
MAGIC = b"PK"


@dataclass
class ProcessedBatches:
    """The batches processed so far: digest, a few of them, and the range of each input."""

    digest: str = ""
    batches: int = 0
    held: list[Batch] = field(default_factory=list)
    last: Batch = field(default_factory=dict)
    """Used for checks while `held` is empty."""
    spans: dict[str, tuple[float, float]] = field(default_factory=dict)
    covered: dict[str, int] = field(default_factory=dict)
    """The number of `held` batches that execute each branch, by path."""
    held_out: list[Batch] = field(default_factory=list)
    """Every `held_out_step`-th held-out batch."""
    held_out_count: int = 0
    held_out_step: int = 1


@dataclass(frozen=True)
class StatsFile:
    """The file of a run's statistics."""

    path: Path
    is_temporary: bool = False
    """Whether the file is removed after a completed run."""
    is_continued: bool = False
    """Whether the data follows the batches in the file, instead of beginning with them."""

    @classmethod
    def at(cls, place: Any) -> StatsFile | None:
        """The file of a path; raises for other objects."""
        if place is None or isinstance(place, StatsFile):
            return place
        if isinstance(place, (Ranges, CalibrationRecord)):
            raise _only_ranges(type(place).__name__)
        if not isinstance(place, (str, Path)):
            raise CalibrationError(
                "statistics is not a path", expected="a str or Path", found=type(place).__name__
            )
        return cls(Path(place))

    def require_usable(self, has_data: bool) -> None:
        """Raise for an unusable path before the run starts."""
        if has_data:
            require_writable(self.path)
        if not self.path.exists():
            if has_data:
                return
            raise CalibrationError(
                "there is no data to calibrate with",
                expected="data, or a file of statistics",
                found=f"no file {self.path}",
                hint=NO_DATA_HINT,
            )
        try:
            with self.path.open("rb") as file:
                first = file.read(len(RANGES_MAGIC))
        except OSError as error:
            raise CalibrationError(f"cannot read {self.path}: {error.strerror or error}") from None
        if first == RANGES_MAGIC:
            raise _only_ranges(str(self.path))
        if not first.startswith(MAGIC):
            raise ParseError(
                f"{self.path} is not a file of statistics", hint="Its first bytes differ."
            )

    def save(self, model: str, builder: StatsBuilder, processed: ProcessedBatches) -> None:
        """Write the state of a run atomically."""
        arrays: dict[str, Array] = {}
        points: dict[str, list[dict[str, Any]]] = {}
        for i, (name, stats) in enumerate(builder.stats.items()):
            every, some = stats.every, stats.some
            arrays[f"{i}.ends"] = np.stack([every.low, every.high, some.low, some.high])
            points[name] = []
            for j, key in enumerate(stats.point.windows):
                sample = stats.samples.get(key)
                if sample is None:  # the value was always empty
                    points[name].append({"counted": -1})
                    continue
                for part in ("first", "gram", "total"):
                    arrays[f"{i}.{j}.{part}"] = getattr(sample, part)
                for part, rows in (("rows", sample.rows), ("waiting", sample.pending)):
                    arrays[f"{i}.{j}.{part}"] = np.concatenate([sample.first[:0], *rows])
                parts = [len(rows) for rows in sample.rows]
                points[name].append({"counted": sample.counted, "parts": parts})
        held = processed.held or [processed.last]
        for stem, kept in (("held", held), ("out", processed.held_out)):
            for k, batch in enumerate(kept):
                arrays.update((f"{stem}.{k}.{n}", _plain(array)) for n, array in batch.items())
        header = {
            "format": FORMAT,
            "model": model,
            "data": processed.digest,
            "spans": processed.spans,
            "passed": processed.batches,
            "batches": builder.batches,
            "stride": builder.stride,
            "turns": builder.turns,
            "draw": builder.draw.bit_generator.state,
            "sites": points,
            "chosen": len(processed.held),
            "held": [_elements(batch) for batch in held],
            "out": [_elements(batch) for batch in processed.held_out],
            "covered": processed.covered,
            "out_count": processed.held_out_count,
            "out_step": processed.held_out_step,
        }
        arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)

        def write(file: IO[bytes]) -> None:
            np.savez(file, allow_pickle=False, **arrays)

        write_atomically(self.path, write)

    def spans(self) -> dict[str, tuple[float, float]]:
        """The smallest and largest value of every quantization point, by name."""
        with self._opened() as arrays:
            header = json.loads(bytes(arrays["header"]))
            found = {}
            for i, name in enumerate(header["sites"]):
                low, high, *_ = arrays[f"{i}.ends"]
                found[str(name)] = float(low.min()), float(high.max())
            return found

    def load(self, model: str, builder: StatsBuilder) -> ProcessedBatches | None:
        """Restore the builder from the file; None if there is no file."""
        if not self.path.exists():
            return None
        with self._opened() as arrays:
            header = json.loads(bytes(arrays["header"]))
            self._require_same_model(header, model)
            return _restore(arrays, header, builder)

    @contextmanager
    def _opened(self) -> Iterator[Mapping[str, Array]]:
        """The arrays of the file; raises for a damaged one."""
        try:
            with np.load(self.path, allow_pickle=False) as arrays:
                yield arrays
        except (
            *(OSError, ValueError, KeyError, TypeError, EOFError, AttributeError),
            *(zipfile.BadZipFile, zlib.error),
        ) as error:
            raise ParseError(
                f"the statistics in {self.path} are damaged: {error}", hint="Remove the file."
            ) from None

    def _require_same_model(self, header: Mapping[str, Any], model: str) -> None:
        if header["format"] != FORMAT:
            raise ParseError(
                f"the statistics in {self.path} have another format version",
                expected=FORMAT,
                found=header["format"],
                hint="Use another file, or remove this one.",
            )
        if header["model"] != model:
            raise CalibrationError(
                f"the statistics in {self.path} belong to another model",
                hint="The structure, the weights or the version of bitwright differ: "
                "use another file, or remove this one.",
            )


def _restore(
    arrays: Mapping[str, Array], header: Mapping[str, Any], to: StatsBuilder
) -> ProcessedBatches:
    for i, (name, found) in enumerate(header["sites"].items()):
        point = to.points[name]
        low, high, some_low, some_high = arrays[f"{i}.ends"]
        stats = CalibrationStats(point, Channels(low, high), Channels(some_low, some_high))
        for j, (key, facts) in enumerate(zip(point.windows, found, strict=True)):
            if facts["counted"] < 0:
                continue
            first, rows, gram, total, pending = (arrays[f"{i}.{j}.{part}"] for part in _PARTS)
            ends = np.cumsum([0, *facts["parts"]])
            parts = [rows[a:b] for a, b in pairwise(ends)]
            counted = int(facts["counted"])
            buffered = [pending] if len(pending) else []
            stats.samples[key] = Sample(first, parts, gram, total, counted, buffered)
        to.stats[name] = stats
    to.batches, to.stride, to.turns = (int(header[k]) for k in ("batches", "stride", "turns"))
    to.draw.bit_generator.state = header["draw"]
    held, held_out = (
        [
            {n: _restored(arrays[f"{stem}.{k}.{n}"], element) for n, element in batch.items()}
            for k, batch in enumerate(header[stem])
        ]
        for stem in ("held", "out")
    )
    spans = {name: (float(low), float(high)) for name, (low, high) in header["spans"].items()}
    counts = (int(header[key]) for key in ("out_count", "out_step"))
    covered = {str(path): int(count) for path, count in header["covered"].items()}
    chosen, batches = held[: int(header["chosen"])], int(header["passed"])
    return ProcessedBatches(
        str(header["data"]), batches, chosen, held[-1], spans, covered, held_out, *counts
    )


def _elements(batch: Batch) -> dict[str, str]:
    return {name: dtype(array.dtype).name for name, array in batch.items()}


def _plain(array: Array) -> Array:
    """The array in a builtin numpy type, which .npz files require."""
    if array.dtype.kind == "V":  # ml_dtypes: bf16 and narrower
        return array.view(np.dtype(f"u{array.dtype.itemsize}"))
    return array.astype(str) if array.dtype.kind == "O" else array


def _restored(array: Array, element: str) -> Array:
    wanted = dtype(element).numpy
    return array.view(wanted) if wanted.kind == "V" else array.astype(wanted, copy=False)


def model_digest(graph: Graph) -> str:
    """Digest of the graph's text and the contents of its arrays."""
    return hashlib.sha256(Printer().graph(graph).encode()).hexdigest()


def batch_digest(before: str, batch: Batch) -> str:
    """Digest of a sequence of batches: that of the previous ones, and the next batch."""
    parts = [before, *(f"{n} {blob_key(_plain(array))}" for n, array in sorted(batch.items()))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _only_ranges(what: str) -> CalibrationError:
    return CalibrationError(
        f"{what} holds ranges, but bw.quantize needs rows of values to measure errors",
        expected="a file that bw.quantize wrote (it creates a missing file)",
        hint="Use ranges with insert_q_dq: "
        "quant.insert_q_dq(graph, ranges.record('int8', 'minmax')).",
    )
