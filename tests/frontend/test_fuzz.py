"""A short run of the fuzzer, and a check that it detects failures."""

from collections import Counter

import pytest
from fuzz import FAILURES, Case, fuzz
from fuzz_microsoft_seeds import microsoft_seeds
from fuzz_seeds import Seed, own_seeds

COUNT = 250


def test_damaged_models_are_refused_or_loaded():
    failures: list[str] = []

    def note(case: Case, status: str, detail: str) -> None:
        if status in FAILURES:
            failures.append(f"{status}: case {case.number} ({case.what}): {detail}")

    totals = fuzz(own_seeds() + microsoft_seeds(), 7, 0, COUNT, note)
    assert not failures
    assert totals.total() == COUNT
    assert totals["refused"] > COUNT // 4
    assert totals["ran"] > COUNT // 20


@pytest.mark.parametrize("fault", ["crash", "hang", "memory", "exception"])
def test_the_fuzzer_notices(fault):
    seen: Counter[str] = Counter()
    seeds = [Seed("saboteur", b"\0", fault)]
    totals = fuzz(seeds, 0, 0, 2, lambda case, status, detail: seen.update([status]), patience=2)
    assert fault in FAILURES
    assert seen == Counter({fault: 2}) == totals
