"""The pass of `bw.quantize` over its data: evidence of every site, and a few batches to check on.

With a file (`quant.evidence_file`) it goes on behind the batches that the file holds; an interrupt
ends it between two batches, and what was gathered by then is saved.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bitwright.errors import CalibrationError
from bitwright.ir.graph import Graph
from bitwright.quant.collect import Collector, Evidence
from bitwright.quant.data import Batch, Batches
from bitwright.quant.evidence_file import EvidenceFile, Passed, batch_digest, model_digest
from bitwright.quant.interrupt import interrupt_between_steps
from bitwright.quant.products import Site
from bitwright.quant.progress import progress_bar

GUARD_BATCHES = 4


class Gathering:
    """Evidence from batches, from a file, or from the file first and then the other batches."""

    def __init__(
        self,
        graph: Graph,
        sites: list[Site],
        batches: Batches | None,
        file: EvidenceFile | None,
        threads: int | None,
    ) -> None:
        self.sites, self._batches, self._file = sites, batches, file
        self._count = None if batches is None else batches.known_length
        self._collector = Collector(graph, sites, count=self._count, threads=threads)
        self._model, self._passed = "", Passed()
        if file is not None:
            self._model = model_digest(graph)
            self._passed = file.load(self._model, self._collector) or self._passed
        self._saved = self._collector.batches

    @property
    def evidence(self) -> dict[str, Evidence]:
        return self._collector.evidence

    @property
    def held(self) -> list[Batch]:
        """The batches that a result is checked on."""
        return self._passed.held or [self._passed.last]

    @property
    def batches(self) -> int:
        """The number of batches that were seen."""
        return self._collector.batches

    def run(self, progress: bool | None = None) -> None:
        """See the batches that the file does not hold, then save what all of them showed."""
        if self._batches is not None:
            with (
                interrupt_between_steps() as check,
                progress_bar("calibrating", self._count, progress) as advance,
            ):
                self._see(self._batches, check, advance)
        self._collector.close()
        if self._file is not None and not self._file.is_temporary:
            self.save()

    def _see(
        self, batches: Batches, check: Callable[[], None], advance: Callable[[], None]
    ) -> None:
        known, number, digest = self._collector.batches, 0, ""
        for number, batch in enumerate(batches, 1):
            advance()
            if self._file is not None:
                digest = batch_digest(digest, batch)
            if number > known:
                self._collector.step(batch)
                self._hold(number, batch)
                self._span(batch)
                self._passed.digest = digest
            elif number == known:
                self._require_same_data(digest)
            check()
        if number < known:
            self._require_same_data(digest)

    def _hold(self, number: int, batch: Batch) -> None:
        """Keep a few batches, spread over the data."""
        step = max(1, (self._count or GUARD_BATCHES) // GUARD_BATCHES)
        held = self._passed.held
        is_chosen = number % step == 0 and len(held) < GUARD_BATCHES
        if is_chosen or not held:
            self._passed.last = {name: np.array(array) for name, array in batch.items()}
        if is_chosen:
            held.append(self._passed.last)

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
                f"the data does not begin with the {self._collector.batches} batches that the "
                f"statistics in {self._file.path} were gathered from",
                hint="Leave the data out to use the statistics as they are, or remove the file.",
            )

    def save(self) -> str:
        """Write what is not in the file yet; says where it is and how to go on."""
        if self._file is None or not self.batches or not self._collector.is_between_batches:
            return ""
        if self.batches > self._saved:
            self._file.save(self._model, self._collector, self._passed)
            self._saved = self.batches
        return (
            f"what {self.batches} batches showed is in {self._file.path}; "
            "running the same again goes on from there"
        )

    def finish(self) -> None:
        """The run is over."""
        if self._file is not None and self._file.is_temporary:
            self._file.path.unlink(missing_ok=True)
