"""`train`: trains a model on files of data and writes it, also through quantization."""

from __future__ import annotations

import math
import sys
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import bitwright
from bitwright.cli import common
from bitwright.cli.calibrate import threads_option
from bitwright.cli.data import training_data_options
from bitwright.cli.export import options_given
from bitwright.cli.quantize import check_output, load_beside
from bitwright.cli.train_options import BITS, train_options
from bitwright.errors import ExportError, TrainingError

if TYPE_CHECKING:  # commands import on use, so that --help is quick
    from bitwright.train.history import History
    from bitwright.train.optimizers import Optimizer
    from bitwright.train.schedules import Schedule
    from bitwright.train.trainer import Trainer

WEIGHTS = ".safetensors"


@common.main.command()
@click.argument("model")
@training_data_options
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(),
    help="File to write: .onnx, .bw, or .safetensors for weights alone.",
)
@train_options
@threads_option
@common.json_option
def train(model: str, data: Any, evaluate: Any, output: str, as_json: bool, **given: Any) -> None:
    """Train MODEL on DATA and write it.

    Progress goes to the error stream. The file is written atomically and never over MODEL. With
    --checkpoints, Ctrl-C ends the run after the current step and saves it.
    """
    from bitwright.report.compare import file_bytes

    is_quantizing = given["qat"] or any(given[n] for n in ("weight_bits", "activation_bits"))
    form = _check(output, is_quantizing, evaluate, given)
    graph = common.working(f"reading {Path(model).name}")(load_beside)(model, output)
    begin = time.perf_counter()
    trainer = _trainer(graph, data, is_quantizing, given)
    history = _fit(trainer, data, evaluate, given)
    which = given["which"] or ("best" if evaluate else "ema" if given["ema"] else "last")
    if is_quantizing:
        bitwright.convert_qat(trainer, which).save(output, **form)
    else:
        trainer.save(output, which)
    sizes = file_bytes(Path(model)), file_bytes(Path(output))
    facts = _facts(trainer, history, time.perf_counter() - begin) | {"weights": which}
    if as_json:
        return common.print_json({"model": model, "output": output, "file_bytes": sizes} | facts)
    _print(facts)
    common.print_size(model, output, sizes)


def _check(
    output: str, is_quantizing: bool, evaluate: Any, given: dict[str, Any]
) -> dict[str, Any]:
    """The options of the file to write; raises before training for what would fail at its end."""
    if given["epochs"] is None and given["steps"] is None:
        raise TrainingError("the end of the run is missing", expected="--epochs or --steps")
    if given["which"] == "best" and evaluate is None:
        raise TrainingError("there is no best model without evaluations", expected="--evaluate")
    if given["which"] == "ema" and given["ema"] is None:
        raise TrainingError("there are no averaged weights", expected="--ema")
    if given["checkpoint_every"] and not given["checkpoints"]:
        raise TrainingError("--checkpoint-every needs a folder", expected="--checkpoints")
    for name in ("metrics", "checkpoints", "tensorboard"):
        if given[name] and Path(given[name]).resolve() == Path(output).resolve():
            raise ExportError(f"--{name} and --output are both {output}")
    if Path(output).suffix == WEIGHTS and not is_quantizing:
        from bitwright.ir.container import require_writable

        require_writable(output)
    elif Path(output).suffix == WEIGHTS:
        raise ExportError("a quantized model is more than weights", expected=".onnx or .bw")
    else:
        check_output(output)
    if given["consumer"] and not is_quantizing:
        raise ExportError("--consumer is for quantized models", expected="--qat")
    return options_given(output, {"consumer": given["consumer"]})


def _trainer(
    graph: bitwright.Graph, data: Any, is_quantizing: bool, given: dict[str, Any]
) -> Trainer:
    """The trainer of a float model, or of one prepared for training through quantization."""
    from bitwright.train.checkpoints import Checkpoints
    from bitwright.train.qat.prepare import is_quantized

    folder, teacher = given["checkpoints"], given["teacher"]
    if is_quantizing:
        if teacher is None and given["loss"] is None and not is_quantized(graph):
            teacher = graph
    elif is_quantized(graph) and not any(".lora_" in v.name for v in graph.parameters):
        raise TrainingError(
            "the weights of the model are quantized",
            hint="Train through quantization (--qat), or add adapters (bw.add_lora).",
        )
    names = "loss precision clip accumulate ema seed threads labels distillation temperature"
    return bitwright.Trainer(
        _prepared(graph, data, given) if is_quantizing else graph,
        optimizer=_optimizer(given),
        teacher=teacher,
        checkpoints=Checkpoints(folder, given["checkpoint_every"]) if folder else None,
        output=given["loss_output"],
        distillation_weight=given["distillation_weight"],
        freeze=given["freeze"],
        **{name: given[name] for name in names.split()},
    )


def _prepared(graph: bitwright.Graph, data: Any, given: dict[str, Any]) -> Any:
    """The model for training through quantization; a float one is calibrated with the data."""
    from bitwright.train.data import Batches
    from bitwright.train.qat.prepare import is_quantized

    config = bitwright.QatConfig(
        weight_bits=BITS.get(given["weight_bits"]),
        activation_bits=given["activation_bits"] and int(given["activation_bits"]),
        ends_in_8_bits=given["ends_in_8_bits"],
    )
    if is_quantized(graph):
        return bitwright.prepare_qat(graph, config)
    batches = Batches(data, graph, (), given["batch_size"], given["shuffle"], given["seed"])
    some = list(islice(batches.epoch(0), given["calibration_batches"]))
    with common.notes_of_data():
        prepare = common.working("quantizing")(bitwright.prepare_qat)
        return prepare(graph, config, some, threads=given["threads"])


def _optimizer(given: dict[str, Any]) -> Optimizer:
    from bitwright.train.optimizers import OPTIMIZERS

    kind, options = given["optimizer"], {}
    for name in ("lr", "momentum", "weight_decay"):
        if given[name] is not None:
            options[name] = given[name]
    if given["nesterov"]:
        options["nesterov"] = True
    if kind != "sgd" and (wrong := options.keys() & {"momentum", "nesterov"}):
        raise TrainingError(f"--{min(wrong)} is for sgd", found=kind)
    return OPTIMIZERS[kind](**options)


def _schedule(given: dict[str, Any], total: int | None) -> Schedule:
    """The schedule over a run of `total` steps."""
    from bitwright.train import schedules

    kind = given["schedule"]
    if kind in ("cosine", "linear") and not total:
        raise TrainingError(f"--schedule {kind} needs the number of steps", expected="--steps")
    if (kind == "step") != (given["drop_every"] is not None):
        raise TrainingError("--schedule step and --drop-every belong together")
    if kind == "step":
        found = schedules.step_decay(given["drop_every"])
    else:
        found = schedules.constant() if kind == "constant" else getattr(schedules, kind)(total)
    return found if not given["warmup"] else schedules.warmup(given["warmup"]) * found


def _fit(trainer: Trainer, data: Any, evaluate: Any, given: dict[str, Any]) -> History:
    batches = trainer.batches(data, given["batch_size"], given["shuffle"])
    ends = [given["steps"]] if given["steps"] else []
    if given["epochs"] and batches.length is not None:
        ends.append(given["epochs"] * batches.length // given["accumulate"])
    trainer.schedule = _schedule(given, min(ends, default=None))
    held_out = None
    if evaluate is not None:
        held_out = trainer.batches(evaluate, given["batch_size"], False)
        if next(held_out.epoch(0), None) is None:  # bad data is an error before training
            raise TrainingError("the data of --evaluate is empty")
    names = "epochs steps evaluate_every resume patience metric metrics tensorboard log_every"
    return trainer.fit(
        batches,
        evaluate=held_out,
        progress=not given["quiet"],
        **{name: given[name] for name in names.split()},
    )


def _facts(trainer: Trainer, history: History, seconds: float) -> dict[str, Any]:
    loss = history.loss
    return {
        "steps": trainer.progress.step,
        "seconds": round(seconds, 3),
        "loss": loss if math.isfinite(loss) else None,
        "evaluations": history.evaluations,
        "best_step": None if trainer.progress.best is None else trainer.progress.best_step,
        "skipped": history.skipped,
        "stopped": history.stopped,
    }


def _print(facts: dict[str, Any]) -> None:
    ended = "the run had already ended" if facts["loss"] is None else f"loss {facts['loss']:.4g}"
    common.print_line(f"{facts['steps']:,} steps in {facts['seconds']:.1f} s, {ended}")
    if facts["skipped"]:
        common.print_line(f"{facts['skipped']} steps skipped, because gradients overflowed f16")
    if facts["stopped"]:
        common.print_line(f"stopped early: {facts['stopped']}")
    best = [one for one in facts["evaluations"] if one["step"] == facts["best_step"]]
    if best:
        values = ", ".join(f"{n} {v:.5g}" for n, v in best[-1].items() if n != "step")
        common.print_line(f"best evaluation, after step {facts['best_step']:,}: {values}")
    if facts["weights"] != "last":
        common.print_line(f"weights: {facts['weights']}")
    sys.stdout.flush()
