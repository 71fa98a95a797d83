"""The pass of `bw.quantize` over its data: evidence of every site, and a few batches to check on.

Every 8th batch, from the 4th on, is held out: ranges and weights do not come from it. Of two or
more, every other one is among the batches that choices are checked on, as static ranges look better
on the data that they were taken from; on the rest the outputs of the result are measured.

With a file (`quant.calibration.stats_file`) it goes on behind the batches that the file holds; an interrupt
ends it between two batches, and what was gathered by then is saved.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bitwright.errors import CalibrationError
from bitwright.ir.graph import Graph
from bitwright.quant.calibration.interrupt import interrupt_between_steps
from bitwright.quant.calibration.progress import progress_bar
from bitwright.quant.calibration.stats import CalibrationStats, StatsBuilder
from bitwright.quant.calibration.stats_file import Passed, StatsFile, batch_digest, model_digest
from bitwright.quant.data.batches import Batch, Batches, has_samples, no_samples
from bitwright.quant.model.points import QuantizationPoint

GUARD_BATCHES = 4
"""Batches of those that were learned from, and of those held out, that choices are checked on."""
OF_A_BRANCH, MOST_CHECKED = 2, 12
"""Of those, batches that reach a branch, and all together: what no batch reaches costs nothing."""
HELD_OUT_OF, FIRST_HELD_OUT = 8, 4
MOST_HELD_OUT, BYTES_HELD_OUT = 64, 1 << 26
"""Held-out batches that are kept at most: of more, every second one, fourth one …"""


def is_held_out(number: int) -> bool:
    """Whether nothing is learned from the batch of this number, counted from 1."""
    return number % HELD_OUT_OF == FIRST_HELD_OUT


class CalibrationRun:
    """Evidence from batches, from a file, or from the file first and then the other batches."""

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
        self._model, self._passed = "", Passed()
        if file is not None:
            self._model = model_digest(graph)
            self._passed = file.load(self._model, self._builder) or self._passed
        self._saved = self._passed.batches

    @property
    def stats(self) -> dict[str, CalibrationStats]:
        return self._builder.stats

    @property
    def checked(self) -> list[Batch]:
        """The batches that choices are checked on."""
        apart = self._passed.held_out
        unseen = apart[::2][:GUARD_BATCHES] if len(apart) > 1 else []
        return [*(self._passed.held or [self._passed.last]), *unseen]

    @property
    def held_out(self) -> list[Batch]:
        """The batches that the result is measured on and nothing else; none where there were too
        few batches."""
        return self._passed.held_out[1::2] or self._passed.held_out

    @property
    def batches(self) -> int:
        """The number of batches that went by."""
        return self._passed.batches

    def run(self, progress: bool | None = None) -> None:
        """See the batches that the file does not hold, then save what all of them showed."""
        if self._batches is not None:
            with (
                interrupt_between_steps() as check,
                progress_bar("calibrating", self._total, progress) as advance,
            ):
                self._see(self._batches, check, advance)
        self._require_samples()
        self._builder.close()
        if self._file is not None and not self._file.is_temporary:
            self.save()

    def _see(
        self, batches: Batches, check: Callable[[], None], advance: Callable[[], None]
    ) -> None:
        known, number, digest = self._passed.batches, 0, ""
        for number, batch in enumerate(batches, 1):
            advance()
            if self._file is not None:
                digest = batch_digest(digest, batch)
            if number > known:
                self._take(number, batch)
                self._passed.batches, self._passed.digest = number, digest
            elif number == known:
                self._require_same_data(digest)
            check()
        if number < known:
            self._require_same_data(digest)

    def _take(self, number: int, batch: Batch) -> None:
        """Learn from a batch, or hold it out; one without samples shows nothing."""
        if not has_samples(batch):
            return
        self._span(batch)
        if is_held_out(number):
            _require_numbers(number, batch)
            self._hold_out(batch)
        else:
            self._builder.step(batch)
            self._hold(batch)

    def _hold(self, batch: Batch) -> None:
        """Keep a few batches, spread over the data, and some for every branch."""
        step = max(1, (self._count or GUARD_BATCHES) // GUARD_BATCHES)
        held, covered = self._passed.held, self._passed.covered
        is_spread = self._builder.batches % step == 0 and len(held) < GUARD_BATCHES
        rare = [p for p in self._builder.reached if p and covered.get(p, 0) < OF_A_BRANCH]
        is_chosen = is_spread or (bool(rare) and len(held) < MOST_CHECKED)
        if is_chosen or not held:
            self._passed.last = _copied(batch)
        if is_chosen:
            held.append(self._passed.last)
            for path in self._builder.reached:
                covered[path] = covered.get(path, 0) + 1

    def _hold_out(self, batch: Batch) -> None:
        passed = self._passed
        kept = passed.held_out
        if passed.held_out_count % passed.held_out_step == 0:
            kept.append(_copied(batch))
            size = sum(array.nbytes for one in kept for array in one.values())
            if len(kept) > MOST_HELD_OUT or (size > BYTES_HELD_OUT and len(kept) > 2):
                del kept[1::2]
                passed.held_out_step *= 2
        passed.held_out_count += 1

    def _require_samples(self) -> None:
        """What was never seen cannot be quantized, and a float model is not what was asked for."""
        outside = [point.name for point in self.points if not point.is_inside]
        is_blind = bool(outside) and not any(name in self.stats for name in outside)
        if self._builder.batches == 0 or is_blind:
            raise no_samples(self.batches)

    def _span(self, batch: Batch) -> None:
        spans = self._passed.spans
        for name, array in batch.items():
            if array.size and array.dtype.kind not in "OUST":
                low, high = spans.get(name, (np.inf, -np.inf))
                spans[name] = min(low, float(array.min())), max(high, float(array.max()))

    def notes(self) -> list[str]:
        """What the data cannot tell, though it ran."""
        found = []
        if self.batches == 1:
            found.append("only one batch was seen: ranges may be too narrow for other data")
        if not self.held_out:
            found.append(
                f"no batch was held out, since there were fewer than {FIRST_HELD_OUT}: outputs are "
                "measured on the data that the model was calibrated with, and look better than "
                "they are"
            )
        constant = {name: low for name, (low, high) in self._passed.spans.items() if low == high}
        if constant and len(constant) == len(self._passed.spans):
            values = ", ".join(f"{name} is {value:g}" for name, value in constant.items())
            found.append(
                f"the data never varies ({values} throughout): errors measured on it mean little"
            )
        return found

    def _require_same_data(self, digest: str) -> None:
        if self._file is not None and digest != self._passed.digest:
            raise CalibrationError(
                f"the data does not begin with the {self._passed.batches} batches that the "
                f"statistics in {self._file.path} were gathered from",
                hint="Leave the data out to use the statistics as they are, or remove the file.",
            )

    def save(self) -> str:
        """Write what is not in the file yet; says where it is and how to go on."""
        if self._file is None or not self.batches or not self._builder.is_between_batches:
            return ""
        if self.batches > self._saved:
            self._file.save(self._model, self._builder, self._passed)
            self._saved = self.batches
        return (
            f"what {self.batches} batches showed is in {self._file.path}; "
            "running the same again goes on from there"
        )

    def finish(self) -> None:
        """The run is over."""
        if self._file is not None and self._file.is_temporary:
            self._file.path.unlink(missing_ok=True)


def _require_numbers(number: int, batch: Batch) -> None:
    """A broken sample is said of a batch, also where nothing is learned from it."""
    for name, array in batch.items():
        if np.issubdtype(array.dtype, np.floating) and np.isnan(array).any():
            raise CalibrationError(
                f"the input {name!r} holds NaN",
                where=f"batch {number - 1} of the data",
                hint="Look for broken samples.",
            )


def _copied(batch: Batch) -> Batch:
    return {name: np.array(array) for name, array in batch.items()}
