"""CalibrationRun: the pass of `bw.quantize` over its data.

It accumulates CalibrationStats of every quantization point and keeps some batches for checks. Every
8th batch, from the 4th on, is held out: ranges and weights do not depend on it. If there are two or
more held-out batches, every other one is used to check choices, because static ranges look better
on the data that they come from. The final outputs are measured on the rest.

With a file (`stats_file`) a run continues after the batches in the file. An interrupt stops it
between two batches and saves the statistics so far.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bitwright.errors import CalibrationError
from bitwright.ir.graph import Graph
from bitwright.quant.calibration import stats_file
from bitwright.quant.calibration.interrupt import interrupt_between_steps
from bitwright.quant.calibration.progress import progress_bar
from bitwright.quant.calibration.stats import CalibrationStats, StatsBuilder
from bitwright.quant.calibration.stats_file import ProcessedBatches, StatsFile
from bitwright.quant.calibration.time_limit import check_time
from bitwright.quant.data.batches import Batch, Batches, has_samples, no_samples
from bitwright.quant.model.points import QuantizationPoint

GUARD_BATCHES = 4
"""Calibration batches, and held-out batches, that choices are checked on."""
OF_A_BRANCH, MOST_CHECKED = 2, 12
"""Checked batches per branch of the model, and their maximum number."""
HELD_OUT_OF, FIRST_HELD_OUT = 8, 4
MOST_HELD_OUT, BYTES_HELD_OUT = 64, 1 << 26
"""Limits for stored held-out batches; beyond them every second, fourth ... one is stored."""


def is_held_out(number: int) -> bool:
    """Whether the batch of this number (from 1) is held out."""
    return number % HELD_OUT_OF == FIRST_HELD_OUT


class CalibrationRun:
    """CalibrationStats from batches, from a file, or from a file and further batches."""

    def __init__(
        self,
        graph: Graph,
        points: list[QuantizationPoint],
        batches: Batches | None,
        file: StatsFile | None,
        threads: int | None,
    ) -> None:
        self.points, self._batches, self._file = points, batches, file
        self._total = None if batches is None else batches.known_length
        self._count = self._total
        if self._total is not None:
            self._count = sum(not is_held_out(number) for number in range(1, self._total + 1))
        self._builder = StatsBuilder(graph, points, count=self._count, threads=threads)
        self._model, self._processed = "", ProcessedBatches()
        if file is not None:
            self._model = stats_file.model_digest(graph)
            self._processed = file.load(self._model, self._builder) or self._processed
        self._saved = self._processed.batches
        self._continues = file is not None and file.is_continued
        self._guards = GUARD_BATCHES
        if self._continues:
            held = self._processed.held
            del held[: len(held) + GUARD_BATCHES - MOST_CHECKED]
            self._guards += len(held)

    @property
    def stats(self) -> dict[str, CalibrationStats]:
        return self._builder.stats

    @property
    def checked(self) -> list[Batch]:
        """The batches that choices are checked on."""
        held_out = self._processed.held_out
        unseen = held_out[::2][:GUARD_BATCHES] if len(held_out) > 1 else []
        return [*(self._processed.held or [self._processed.last]), *unseen]

    @property
    def held_out(self) -> list[Batch]:
        """The batches that only the final measurement uses; none if there were too few batches."""
        return self._processed.held_out[1::2] or self._processed.held_out

    @property
    def batches(self) -> int:
        return self._processed.batches

    def run(self, progress: bool | None = None) -> None:
        """Process the batches that the file does not contain, then save the statistics."""
        if self._batches is not None:
            with (
                interrupt_between_steps() as check,
                progress_bar("calibrating", self._total, progress) as advance,
            ):
                self._process(self._batches, check, advance)
        self._require_samples()
        self._builder.close()
        if self._file is not None and not self._file.is_temporary:
            self.save()

    def _process(
        self, batches: Batches, check: Callable[[], None], advance: Callable[[], None]
    ) -> None:
        known, number, digest = self._processed.batches, 0, ""
        if self._continues:
            number, digest = known, self._processed.digest
        for number, batch in enumerate(batches, number + 1):  # noqa: B020 (it starts at `number`)
            advance()
            check_time()
            if self._file is not None:
                digest = stats_file.batch_digest(digest, batch)
            if number > known:
                self._add(number, batch)
                self._processed.batches, self._processed.digest = number, digest
            elif number == known:
                self._require_same_data(digest)
            check()
        if number < known:
            self._require_same_data(digest)
        self._continues = False

    def _add(self, number: int, batch: Batch) -> None:
        """Use a batch for calibration, or hold it out; batches without samples are skipped."""
        if not has_samples(batch):
            return
        self._update_spans(batch)
        if is_held_out(number):
            _require_numbers(number, batch)
            self._hold_out(batch)
        else:
            self._builder.step(batch)
            self._keep_for_checks(batch)

    def _keep_for_checks(self, batch: Batch) -> None:
        """Keep a few batches, spread over the data, and some for every branch of the model."""
        step = max(1, (self._count or GUARD_BATCHES) // GUARD_BATCHES)
        held, covered = self._processed.held, self._processed.covered
        is_spread = self._builder.batches % step == 0 and len(held) < self._guards
        rare = [p for p in self._builder.reached if p and covered.get(p, 0) < OF_A_BRANCH]
        is_chosen = is_spread or (bool(rare) and len(held) < MOST_CHECKED)
        if is_chosen or not held:
            self._processed.last = _copied(batch)
        if is_chosen:
            held.append(self._processed.last)
            for path in self._builder.reached:
                covered[path] = covered.get(path, 0) + 1

    def _hold_out(self, batch: Batch) -> None:
        processed = self._processed
        kept = processed.held_out
        if processed.held_out_count % processed.held_out_step == 0:
            kept.append(_copied(batch))
            size = sum(array.nbytes for one in kept for array in one.values())
            if len(kept) > MOST_HELD_OUT or (size > BYTES_HELD_OUT and len(kept) > 2):
                del kept[1::2]
                processed.held_out_step *= 2
        processed.held_out_count += 1

    def _require_samples(self) -> None:
        """Raise if no point has statistics: the result would be a float model."""
        outside = [point.name for point in self.points if not point.is_inside]
        is_unobserved = bool(outside) and not any(name in self.stats for name in outside)
        if self._builder.batches == 0 or is_unobserved:
            raise no_samples(self.batches)

    def _update_spans(self, batch: Batch) -> None:
        spans = self._processed.spans
        for name, array in batch.items():
            if array.size and array.dtype.kind not in "OUST":
                low, high = spans.get(name, (np.inf, -np.inf))
                spans[name] = min(low, float(array.min())), max(high, float(array.max()))

    def notes(self) -> list[str]:
        """Notes on the limits of the data."""
        found = []
        if self.batches == 1:
            found.append("only one batch was seen: ranges may be too narrow for other data")
        if not self.held_out:
            found.append(
                f"no batch was held out, because there were fewer than {FIRST_HELD_OUT}: outputs "
                "are measured on the calibration data, which overstates their accuracy"
            )
        constant = {name: low for name, (low, high) in self._processed.spans.items() if low == high}
        if constant and len(constant) == len(self._processed.spans):
            values = ", ".join(f"{name} is {value:g}" for name, value in constant.items())
            found.append(
                f"the data is constant ({values}): errors measured on it are not meaningful"
            )
        return found

    def _require_same_data(self, digest: str) -> None:
        if self._file is not None and digest != self._processed.digest:
            raise CalibrationError(
                f"the data does not begin with the {self._processed.batches} batches of the "
                f"statistics in {self._file.path}",
                hint="Omit the data to use the statistics as they are, or remove the file.",
            )

    def save(self) -> str:
        """Write new statistics to the file; returns a note on how to continue.

        An interrupted run that continues a file does not write: the same data would count twice.
        """
        if self._file is None or not self.batches or not self._builder.is_between_batches:
            return ""
        if self._continues:
            return ""
        if self.batches > self._saved:
            self._file.save(self._model, self._builder, self._processed)
            self._saved = self.batches
        return (
            f"the statistics of {self.batches} batches are in {self._file.path}; "
            "the same command continues from there"
        )

    def finish(self) -> None:
        """Remove a temporary file after a completed run."""
        if self._file is not None and self._file.is_temporary:
            self._file.path.unlink(missing_ok=True)


def _require_numbers(number: int, batch: Batch) -> None:
    """Raise if an input contains NaN; held-out batches are checked too."""
    for name, array in batch.items():
        if np.issubdtype(array.dtype, np.floating) and np.isnan(array).any():
            raise CalibrationError(
                f"the input {name!r} holds NaN",
                where=f"batch {number - 1} of the data",
                hint="Check the samples.",
            )


def _copied(batch: Batch) -> Batch:
    return {name: np.array(array) for name, array in batch.items()}
