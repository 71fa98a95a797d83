"""Tries candidates of the ladder until none is left that could be better.

A candidate beyond the allowed drop bounds the allowed error from above, one within it from below.
The next one is the fastest with an error that the last measured drop allows, if drops grow like
errors, else the one in the middle. Where the measured time of a candidate differs from the
predicted one, the cost of boundaries between unlike precisions is corrected and the ladder solved
again.
"""

from __future__ import annotations

from bitwright.tuning.precision.assignment import Assignment
from bitwright.tuning.precision.precisions import FLOAT, recipe_of
from bitwright.tuning.precision.session import NOISE, Session
from bitwright.tuning.precision.tables import Tables
from bitwright.tuning.precision.trial import FLOAT_NAME, Trial, recipe_key

MAX_TRIALS = 12
MAX_CORRECTIONS = 4
MAX_FAILURES = 3
"""Candidates in a row that are not faster than the best model."""
MAX_CHANGE = 50.0
"""The most that a measured time changes the cost of boundaries, as a factor."""
OPTIMISM = 0.25
"""The fraction of the measured boundary cost that the first candidate may assume; its own time
shows what boundaries cost."""
GAIN = 0.01
"""The least predicted gain of a candidate that is tried."""
MARGIN = 0.9
"""Of the error that a measured drop allows."""


class Refinement:
    def __init__(self, session: Session, tables: Tables) -> None:
        self.session, self.tables = session, tables
        self.passing, self.failing = 0.0, float("inf")
        """Predicted errors: the largest within the drop, the smallest beyond it."""
        self._guess: float | None = None
        self._tried: set[str] = set()
        self._corrections = 0

    def run(self) -> str:
        """Try candidates; the reason for the end."""
        if not self.tables.units:
            return "no layer can have another precision"
        self._learn_from_known()
        ladder, failures = self._ladder(), 0
        for number in range(MAX_TRIALS):
            open_ = self._open(ladder)
            if not open_ and number == 0:
                self.tables.boundary *= OPTIMISM
                ladder = self._ladder()
                open_ = self._open(ladder)
            if not open_:
                return "nothing faster is left to try" if number else "converged"
            self._score_ahead(open_)
            candidate = self._next(open_)
            trial = self._try(candidate)
            failures = failures + 1 if trial is not self.session.best else 0
            if failures >= MAX_FAILURES and trial.score is None:
                return "predicted gains were not confirmed"
            if self._correct(candidate, trial):
                ladder = self._ladder()
        return "converged"

    def _ladder(self) -> list[Assignment]:
        return self.tables.ladder(self.session.problem.prepared, self.session.objective)

    def _learn_from_known(self) -> None:
        """Use the scores of the uniform models as bounds where the ladder contains them."""
        for trial in list(self.session.trials.values()):
            self._tried.add(trial.key)

    def _predicted(self, one: Assignment) -> float:
        """The predicted objective of a candidate.

        Latency is relative to the best model's, whose steps were timed under the same conditions
        as the candidate's; bytes are relative to the float model's.
        """
        session, tables = self.session, self.tables
        graph, objective = session.problem.prepared, session.objective
        reference = session.best
        known = None
        if objective == "latency" and reference is not None:
            known = tables.evaluate(graph, objective, reference.precisions)
        if known is None:
            reference = session.named(FLOAT_NAME)
            known = tables.evaluate(graph, objective, dict.fromkeys(one.precisions, FLOAT))
        assert reference is not None and known is not None
        value = reference.value(objective)
        if objective != "latency":
            return value + one.cost - known.cost
        overhead = tables.times[FLOAT].overhead_seconds
        return value * (one.cost + overhead) / max(1e-12, known.cost + overhead)

    def _open(self, ladder: list[Assignment]) -> list[Assignment]:
        """Candidates between the bounds that are predicted to be better than the best model."""
        best = self.session.best
        assert best is not None
        limit = best.value(self.session.objective) * (1 - GAIN)
        return [
            one
            for one in ladder
            if self.passing <= one.error < self.failing
            and self._predicted(one) < limit
            and recipe_key(self._recipe(one)) not in self._tried
        ]

    def _recipe(self, one: Assignment) -> dict[str, object]:
        units = [unit for unit in self.tables.units if unit.name in one.precisions]
        return recipe_of(units, one.precisions)

    def _next(self, open_: list[Assignment]) -> Assignment:
        if self.failing == float("inf"):
            return open_[-1]  # nothing has failed yet: the fastest
        if self._guess is not None:
            fitting = [one for one in open_ if one.error <= self._guess]
            self._guess = None
            if fitting:
                return fitting[-1]
        return open_[len(open_) // 2]

    def _score_ahead(self, open_: list[Assignment]) -> None:
        """With Ray: score candidates that may be next, all at once."""
        scores = self.session.scores
        if scores is None:
            return
        count = min(len(open_), scores.workers)
        places = {round(i * (len(open_) - 1) / max(1, count - 1)) for i in range(count)}
        places.add(len(open_) - 1)
        wanted = [self._recipe(open_[place]) for place in sorted(places)]
        scores.compute([recipe for recipe in wanted if scores.known(recipe) is None])

    def _try(self, candidate: Assignment) -> Trial:
        session = self.session
        recipe = self._recipe(candidate)
        predicted = candidate.error, self._predicted(candidate)
        name = f"mixed {len(self._tried)}"
        trial = session.trial(name, recipe, candidate.precisions, predicted=predicted)
        self._tried.add(trial.key)
        if trial.score is None:
            return trial  # not faster: its score says nothing that is needed
        if session.metric.is_within(trial.score):
            self.passing = max(self.passing, candidate.error)
        else:
            self.failing = min(self.failing, candidate.error)
            allowed = session.metric.max_drop.allowed(session.metric.reference)
            drop = session.metric.drop(trial.score)
            self._guess = MARGIN * candidate.error * allowed / drop if drop > 0 else None
        return trial

    def _correct(self, candidate: Assignment, trial: Trial) -> bool:
        """Fit the cost of boundaries to the measured time; whether it changed."""
        session, tables = self.session, self.tables
        if session.objective != "latency" or self._corrections >= MAX_CORRECTIONS:
            return False
        predicted = trial.predicted_latency or 0.0
        if abs(trial.latency - predicted) <= 2 * NOISE["latency"] * trial.latency:
            return False
        graph = session.problem.prepared
        elements = tables.boundary_elements(graph, "latency", candidate.precisions)
        if not elements:
            return False
        self._corrections += 1
        wanted = tables.boundary + (trial.latency - predicted) / elements
        measured = tables.measured_boundary()
        tables.boundary = min(max(wanted, measured / MAX_CHANGE), measured * MAX_CHANGE)
        return True
