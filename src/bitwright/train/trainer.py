"""`bw.Trainer`: trains the parameters of a graph with compiled steps.

    trainer = bw.Trainer(graph, loss="cross_entropy", optimizer=bw.AdamW(lr=1e-3))
    trainer.fit({"x": images, "labels": labels}, epochs=3, batch_size=128)
    trainer.graph().save("trained.onnx")

A run is determined by its seed: with the same data, the same steps follow on any number of threads,
and a run that is resumed from a checkpoint continues bit for bit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bitwright.errors import BitwrightError, NonFiniteError, TrainingError
from bitwright.frontend.load import load
from bitwright.frontend.parameters import load_parameters
from bitwright.ir.arrays import Array
from bitwright.ir.graph import Graph
from bitwright.passes.manager import Pass
from bitwright.quant.calibration.interrupt import interrupt_between_steps
from bitwright.train.checkpoints import (
    BEST,
    Checkpoints,
    Progress,
    read_checkpoint,
    structure_of,
    write_checkpoint,
)
from bitwright.train.data import Batch, Batches, Position, sample_count
from bitwright.train.diagnosis import first_nonfinite
from bitwright.train.evaluations import Evaluations
from bitwright.train.groups import freeze as freeze_parameters
from bitwright.train.groups import require_free_names, require_matches
from bitwright.train.history import History, Reporter
from bitwright.train.losses import loss_of
from bitwright.train.modes import eval_mode, without_states
from bitwright.train.optimizers import PREFIX, optimizer_of
from bitwright.train.program import StepProgram, Teacher
from bitwright.train.qat.model import QatModel
from bitwright.train.schedules import name_of, schedule_of
from bitwright.train.step import LOSS, NORM, RATE, SCALE, Settings
from bitwright.train.weights import copy_into, write_weights

_MOST_SKIPPED = 60
"""Consecutive overflows after which an f16 run counts as diverged: 2 ** 60 is below any scale."""


class Trainer:
    """Trains a graph. `fit` may be called several times; each call continues the last one."""

    def __init__(
        self,
        graph: Any,
        *,
        loss: Any = None,
        optimizer: Any = "adamw",
        schedule: Any = None,
        precision: str = "f32",
        teacher: Any = None,
        clip: float | None = None,
        accumulate: int = 1,
        ema: float | None = None,
        seed: int = 0,
        checkpoints: str | Path | Checkpoints | None = None,
        threads: int | None = None,
        target: str = "cpu",
        output: str | None = None,
        labels: str = "labels",
        distillation: Any = None,
        temperature: float = 1.0,
        distillation_weight: float = 1.0,
        decay: Mapping[str, float] | None = None,
        rates: Mapping[str, float] | None = None,
        freeze: Sequence[str] = (),
        batch_norm_momentum: float | None = 0.1,
        passes: Sequence[Pass] = (),
    ) -> None:
        """`loss` is a name of `train.losses`, an output of the graph, or a function of a builder
        and the outputs. `schedule` gives factors of the optimizer's rate. `teacher` is a graph
        whose outputs are the targets (`distillation`: "kl", "mse", "l1", "cosine", `train.Pooled`,
        a function of a builder, an output and a target, or one of these per output).
        `decay` and `rates` give weight decays and learning-rate factors by name pattern, `freeze`
        the patterns of parameters that stay. `passes` run on every step graph once its gradients
        are there, and on the graph of evaluations. A model of `bw.prepare_qat` brings its passes,
        and its learned scales do not decay.
        """
        self.prepared = graph if isinstance(graph, QatModel) else None
        if self.prepared is not None:
            passes = (*self.prepared.passes, *passes)
            decay = {**dict.fromkeys(self.prepared.no_decay, 0.0), **(decay or {})}
        self._source = load(graph)
        self._frozen = tuple([freeze] if isinstance(freeze, str) else freeze)
        trained = freeze_parameters(self._source, self._frozen)
        teacher_graph = None if teacher is None else load(teacher)
        self.loss = loss_of(
            self._source,
            loss,
            output,
            labels,
            teacher_graph,
            distillation,
            temperature,
            distillation_weight,
        )
        self.optimizer, self.schedule = optimizer_of(optimizer), schedule_of(schedule)
        self.settings = Settings(
            self.optimizer,
            precision,
            clip,
            accumulate,
            ema,
            dict(decay or {}),
            dict(rates or {}),
            batch_norm_momentum,
            seed,
            tuple(passes),
            self._frozen,
        )
        require_free_names(self._source)
        names = [value.name for value in self._source.parameters]
        require_matches("decay", self.settings.decay, names)
        require_matches("rates", self.settings.rates, names)
        if checkpoints is not None and not isinstance(checkpoints, Checkpoints):
            checkpoints = Checkpoints(checkpoints)
        self.checkpoints = checkpoints
        self.program = StepProgram(trained, self.loss, self.settings, target, threads)
        self.teacher: Teacher | None = None
        if teacher_graph is not None:
            chosen = tuple(self.loss.distillation)
            self.teacher = Teacher(teacher_graph, chosen, target, threads)
            self.teacher.require_inputs(self._source)
        given = {value.name for value in self._source.inputs}
        self.label_names = tuple(
            v.name
            for v in self.program.last_graph.inputs
            if v.name not in given and not v.name.startswith(PREFIX)
        )
        self._structure = structure_of(self._source)
        self.progress = Progress()
        self._best: dict[str, Array] | None = None

    # training

    def fit(
        self,
        data: Any,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        evaluate: Any = None,
        evaluate_every: int | None = None,
        batch_size: int | None = None,
        shuffle: bool | None = None,
        resume: bool | str | Path = False,
        patience: int | None = None,
        metric: str = LOSS,
        metrics: str | Path | None = None,
        tensorboard: str | Path | None = None,
        log_every: int = 10,
        progress: bool | None = None,
    ) -> History:
        """Train for a number of epochs or steps; the records of the run.

        `evaluate` is data, or a function of the trainer that gives numbers by name; it is used
        every `evaluate_every` steps, or after each epoch. `patience` stops after that many
        evaluations without a better `metric` (lower for losses, higher for others). `resume`
        continues from the newest checkpoint, or from the file given. `metrics` is a file of JSON
        lines, `tensorboard` a folder of event files.
        """
        if epochs is None and steps is None:
            raise TrainingError("the end of the run is missing", expected="epochs= or steps=")
        for what, value in (("epochs", epochs), ("steps", steps)):
            if value is not None and value < 0:
                raise TrainingError(f"{what} is negative", found=value)
        if self.checkpoints is not None:
            self.checkpoints.prepare()
        self._begin(resume)
        batches = self.batches(data, batch_size, shuffle)
        self._check_position(batches)
        last_epoch = None if epochs is None else self.progress.start_epoch + epochs
        last_step = math.inf if steps is None else self.progress.start_step + steps
        history = History(first_step=self.progress.step)
        total = self._total(batches, last_epoch, last_step)
        at = self.progress
        reporter = Reporter(
            history, total, at.step, metrics, tensorboard, progress, log_every, at.evaluated
        )
        try:
            watch = Evaluations(
                self, evaluate, evaluate_every, batch_size, patience, metric, reporter
            )
            with interrupt_between_steps() as check:
                self._run(batches, last_epoch, last_step, reporter, watch, check)
        except KeyboardInterrupt as interrupt:
            if self.checkpoints and self.progress.step and not self._is_inside_step:
                self._save()
                interrupt.add_note(f"The checkpoint is {self.checkpoints.latest()}.")
            raise
        finally:
            reporter.close()
        return history

    _is_inside_step = False
    """Whether the states are those of an unfinished step."""

    def batches(
        self, data: Any, batch_size: int | None = None, shuffle: bool | None = None
    ) -> Batches:
        """Batches of data for `fit` and `evaluate`, which read it only once then."""
        if isinstance(data, Batches):
            return data
        graph, seed = self.program.last_graph, self.settings.seed
        return Batches(data, graph, self.label_names, batch_size, shuffle, seed)

    def _begin(self, resume: bool | str | Path) -> None:
        """Resume from a checkpoint, or start where the last call ended."""
        if resume:
            self._resume(None if resume is True else Path(resume))
            return
        if self.checkpoints is not None and self.progress.step == 0 and self.checkpoints.paths():
            raise TrainingError(
                f"{self.checkpoints.folder} has checkpoints of an earlier run",
                hint="Resume it (resume=True, --resume), or choose another folder.",
            )
        before = self.progress.position
        epoch = before.epoch + (before.index > 0)
        self.progress.position = Position(epoch, 0)
        self.progress.start_epoch, self.progress.start_step = epoch, self.progress.step
        self.progress.stale = 0  # a new call may go on where the last one stopped early
        self.program.clear_sums()

    def _resume(self, path: Path | None) -> None:
        if path is None:
            if self.checkpoints is None:
                raise TrainingError(
                    "there is nothing to resume from", expected="checkpoints=, --checkpoints"
                )
            path = self.checkpoints.latest()
        if path is None:
            return  # a run that was killed before its first checkpoint
        states, progress = read_checkpoint(path, self.fingerprint())
        if self.checkpoints is not None:
            self.checkpoints.require_latest(progress.step)
        best = path.parent / BEST
        if progress.best is not None and best.exists():
            kept = read_checkpoint(best, self.fingerprint())[0]
            self._best = {name: array.copy() for name, array in kept.items()}
        self.program.restore(states)
        self.progress = progress

    def _check_position(self, batches: Batches) -> None:
        """Raise a `TrainingError` if the position in the data was counted in other batches."""
        before, now = self.progress.epoch_length, batches.length
        is_inside = before is not None and 0 < self.progress.position.index < before
        if is_inside and now is not None and now != before:
            raise TrainingError(
                "the run was interrupted in an epoch of other data",
                expected=f"{before} batches",
                found=f"{now} batches",
                hint="Give the same data and batch_size as before.",
            )
        self.progress.epoch_length = now

    def _total(self, batches: Batches, last_epoch: int | None, last_step: float) -> int | None:
        found = last_step
        if last_epoch is not None and batches.length is not None:
            count = (last_epoch - self.progress.start_epoch) * batches.length
            found = min(found, self.progress.start_step + count // self.settings.accumulate)
        return None if found == math.inf else int(found)

    def _run(
        self,
        batches: Batches,
        last_epoch: int | None,
        last_step: float,
        reporter: Reporter,
        watch: Evaluations,
        check_interrupt: Callable[[], None],
    ) -> None:
        waiting: list[Batch] = []
        self._skipped_in_a_row = 0
        before = self.progress.step, self.progress.evaluated
        is_done = self.progress.step >= last_step or watch.is_stopped
        every = self.checkpoints.every if self.checkpoints is not None else None
        for batch, after in () if is_done else batches.stream(self.progress.position, last_epoch):
            watch.before(after)
            if watch.is_stopped:
                break
            waiting.append(self._with_targets(batch))
            if len(waiting) < self.settings.accumulate:
                continue
            self._advance(waiting, after, reporter)
            waiting = []
            if every is not None and self.progress.step % every == 0:
                self._save()
            if self.progress.step >= last_step:
                break
            check_interrupt()
        if waiting and self.progress.step == self.progress.start_step:
            raise TrainingError(
                "the data has fewer batches than one step accumulates",
                expected=self.settings.accumulate,
                found=len(waiting),
            )
        if self.progress.step:
            watch.now()
        if (self.progress.step, self.progress.evaluated) != before:
            self._save()

    def _advance(self, batches: list[Batch], after: Position, reporter: Reporter) -> None:
        """One step, and the progress that it makes."""
        self._is_inside_step = True
        found, rate = self._step(batches)
        is_skipped = self._is_skipped(found)
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if is_skipped else 0
        if self._skipped_in_a_row > _MOST_SKIPPED:
            raise self._diverged(found[LOSS], batches, "every step overflows f16")
        if not is_skipped:
            if not math.isfinite(found[LOSS]):
                raise self._diverged(found[LOSS], batches)
            if not math.isfinite(found.get(NORM, 0.0)):
                raise self._diverged(found[NORM], batches, what="norm of the gradients")
        reporter.history.skipped += is_skipped
        self.progress.step += 1
        self.progress.position = after
        self._is_inside_step = False
        reporter.step(self.progress.step, found, rate, sum(map(sample_count, batches)))

    def _with_targets(self, batch: Batch) -> Batch:
        self.loss.require_labels(batch, dict(self._source.outputs))
        return batch if self.teacher is None else self.teacher.add_targets(batch)

    def _step(self, batches: list[Batch]) -> tuple[dict[str, float], float]:
        rate = self.optimizer.lr * self.schedule(self.progress.step)
        try:
            return self.program.run(batches, rate), rate
        except NonFiniteError as error:
            what = f"{error.what} in step {self.progress.step + 1}"
            raise self._not_finite(what, batches) from None
        except BitwrightError as error:
            raise TrainingError(f"step {self.progress.step + 1} failed: {error}") from error

    def _is_skipped(self, found: Mapping[str, float]) -> bool:
        if self.settings.precision != "f16":
            return False
        return not all(math.isfinite(found[name]) for name in (LOSS, NORM) if name in found)

    def _diverged(
        self, number: float, batches: list[Batch], why: str = "", what: str = "loss"
    ) -> TrainingError:
        """The error of a loss or a norm that is not finite."""
        text = f"the {what} of step {self.progress.step + 1} is {number}"
        return self._not_finite(f"{text} ({why})" if why else text, batches)

    def _not_finite(self, what: str, batches: list[Batch]) -> TrainingError:
        """An error with the op that made something not finite."""
        graph, states, rate = self.program.last_graph, self.program.states, {RATE: np.float32(0)}
        found = (first_nonfinite(graph, {**batch, **rate}, states) for batch in batches)
        rounded = "a sum inside an op overflows; without rounding all results are finite"
        cause = next(filter(None, found), rounded)
        return TrainingError(f"{what}: {cause}", hint=self._last_good())

    def _last_good(self) -> str:
        latest = self.checkpoints.latest() if self.checkpoints is not None else None
        return f"The last good checkpoint is {latest}." if latest else ""

    # evaluation

    def evaluate(
        self, data: Any, *, batch_size: int | None = None, averaged: bool | None = None
    ) -> dict[str, float]:
        """Loss and metrics over data in evaluation form, weighted by the samples of batches.

        The averages of the weights are used if the trainer keeps them and `averaged` is not False.
        """
        batches = self.batches(data, batch_size, False)
        totals: dict[str, float] = {}
        count = 0
        for batch in batches.epoch(0):
            found = self.program.evaluate(self._with_targets(batch), self._averages(averaged))
            size = sample_count(batch)
            count += size
            for name, value in found.items():
                totals[name] = totals.get(name, 0.0) + value * size
        if not count:
            raise TrainingError(
                "the data of the evaluation is empty",
                hint="An iterator can be read only once." if batches.is_read_once else "",
            )
        return {name: value / count for name, value in totals.items()}

    def predict(self, inputs: Mapping[str, Any], averaged: bool | None = None) -> dict[str, Array]:
        """The outputs of the model in evaluation form for one batch."""
        batch = {name: np.asarray(array) for name, array in inputs.items()}
        return self.program.predict(batch, self._averages(averaged))

    def _averages(self, wanted: bool | None) -> bool:
        return self.settings.ema is not None if wanted is None else wanted

    # checkpoints and results

    def fingerprint(self) -> dict[str, str]:
        """What a checkpoint must share with the trainer that reads it."""
        settings = self.settings
        types = {
            name: f"{array.dtype}{list(array.shape)}"
            for name, array in sorted(self.program.states.items())
        }
        kind, loss = self.loss.kind, self.loss
        return {
            "parameters": json.dumps(types),
            "optimizer": repr(self.optimizer),
            "schedule": self.schedule.text,
            "precision": settings.precision,
            "loss": name_of(kind) if callable(kind) else str(kind),
            "output, labels": repr((loss.output, loss.labels)),
            "distillation": repr((loss.comparisons, loss.temperature, loss.weight)),
            "batch_norm_momentum": repr(settings.batch_norm_momentum),
            "clip, accumulate, ema": repr((settings.clip, settings.accumulate, settings.ema)),
            "groups": repr((settings.decay, settings.rates, self._frozen)),
            "seed": str(settings.seed),
            "structure": self._structure,
        }

    def save_checkpoint(self, path: str | Path | None = None) -> None:
        """Write a checkpoint to the folder of the trainer, or to a file."""
        if path is None:
            self._save()
            return
        write_checkpoint(Path(path), self.program.states, self.progress, self.fingerprint())

    def _save(self) -> None:
        """Write a checkpoint; weights that are not finite must not replace good ones."""
        if self.checkpoints is None:
            return
        if name := self.program.nonfinite_weight():
            where = f"after step {self.progress.step}"
            raise TrainingError(
                f"parameter {name!r} is not finite {where}: its update overflowed",
                hint=self._last_good(),
            )
        self.checkpoints.save(self.program.states, self.progress, self.fingerprint())

    def keep_best(self) -> None:
        """Keep the present weights as the best ones."""
        states = self.program.model_states(self._averages(None))
        self._best = {name: array.copy() for name, array in states.items()}
        if self.checkpoints is not None:
            self.checkpoints.save_best(self._best, self.progress, self.fingerprint())

    def parameters(self, which: str = "last") -> dict[str, Array]:
        """Trained parameters and running statistics by name: "last", "best" or "ema"."""
        if which == "best":
            if self._best is None:
                raise TrainingError("there is no best model", hint="fit(evaluate=...) keeps one.")
            return {name: array.copy() for name, array in self._best.items()}
        if which not in ("last", "ema") or (which == "ema" and self.settings.ema is None):
            raise TrainingError(
                f"there are no parameters {which!r}",
                expected="last, best, or ema with Trainer(ema=...)",
            )
        states = self.program.model_states(which == "ema")
        return {name: array.copy() for name, array in states.items()}

    def graph(self, which: str = "last") -> Graph:
        """The graph that the trainer got, with trained values."""
        return load_parameters(self._source, self.parameters(which), strict=False)

    def model(self, which: str = "last") -> Graph:
        """The trained graph in evaluation form: no dropout, running statistics are parameters."""
        return without_states(eval_mode(self.graph(which)))

    def load_into(self, module: Any, which: str = "last") -> None:
        """Copy trained parameters and running statistics into a PyTorch module, by name."""
        copy_into(module, self.parameters(which), self._source)

    def save(self, path: str | Path, which: str = "last") -> None:
        """Write the trained model: .safetensors (weights by name), .onnx, .bw or .txt."""
        if Path(path).suffix == ".safetensors":
            write_weights(path, self.graph(which))
        else:
            self.model(which).save(path)

    @property
    def loss_scale(self) -> float:
        """The present loss scale; 1 unless the precision is f16."""
        return float(self.program.states.get(SCALE, np.float32(1)))
