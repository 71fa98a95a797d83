"""Options of `train`: the loss, steps, the run around them, quantization."""

from __future__ import annotations

from typing import Any

import click

from bitwright.cli.export import OPTIONS as EXPORT

_positive, _count = click.FloatRange(0, min_open=True), click.IntRange(1)
_fraction = click.FloatRange(0, 1, min_open=True, max_open=True)
LOSS = (
    click.option(
        "--loss",
        help="cross_entropy, token_cross_entropy, binary_cross_entropy, mse, l1, cosine, or an "
        "output of the model that is a loss.",
    ),
    click.option("--loss-output", help="The output that the loss reads, if there are several."),
    click.option("--labels", default="labels", show_default=True, help="Name of the labels."),
    click.option(
        "--teacher", type=click.Path(), help="Model whose outputs are the targets: needs no labels."
    ),
    click.option(
        "--distillation",
        type=click.Choice(["kl", "mse", "l1", "cosine"]),
        help="Comparison with the teacher; kl (of logits) by default.",
    ),
    click.option("--temperature", type=_positive, default=1.0, help="Of kl; 1 by default."),
    click.option("--distillation-weight", type=_positive, default=1.0, help="Beside --loss."),
)
STEPS = (
    click.option("--epochs", type=_count, help="Passes over the data."),
    click.option("--steps", type=_count, help="Steps; the end of the run if it comes first."),
    click.option(
        "--optimizer",
        type=click.Choice(["sgd", "adam", "adamw", "lion"]),
        default="adamw",
        show_default=True,
    ),
    click.option("--lr", type=float, help="Learning rate; default: the optimizer's."),
    click.option("--momentum", type=float, help="Of sgd."),
    click.option("--nesterov", is_flag=True, help="Nesterov momentum, of sgd."),
    click.option("--weight-decay", type=float, help="Default: the optimizer's."),
    click.option(
        "--schedule",
        type=click.Choice(["constant", "cosine", "linear", "step"]),
        default="constant",
        show_default=True,
        help="Of the learning rate, over the whole run.",
    ),
    click.option("--warmup", type=click.IntRange(0), default=0, help="Steps of linear warm-up."),
    click.option("--drop-every", type=_count, help="Steps between divisions by 10, of step."),
    click.option(
        "--precision",
        type=click.Choice(["f32", "bf16", "f16"]),
        default="f32",
        show_default=True,
        help="Of products; weights and reductions are f32.",
    ),
    click.option("--clip", type=_positive, help="Largest norm of the gradients."),
    click.option("--accumulate", type=_count, default=1, help="Batches per step."),
    click.option("--ema", type=_fraction, help="Moving average of the weights, e.g. 0.999."),
    click.option("--freeze", multiple=True, help="Pattern of parameters to keep (repeatable)."),
    click.option("--shuffle/--no-shuffle", default=None, help="Default: samples, not files."),
    click.option("--seed", type=int, default=0, help="Of the order of data and of dropout."),
)
RUN = (
    click.option("--evaluate-every", type=_count, help="Steps between evaluations."),
    click.option("--metric", default="loss", show_default=True, help="What decides on the best."),
    click.option("--patience", type=_count, help="Evaluations without a better metric to stop at."),
    click.option(
        "--which",
        type=click.Choice(["last", "best", "ema"]),
        help="Weights to write; default: best with --evaluate, ema with --ema, else last.",
    ),
    click.option("--checkpoints", type=click.Path(), help="Folder of checkpoints."),
    click.option("--checkpoint-every", type=_count, help="Steps; at the end and on Ctrl-C too."),
    click.option("--resume", is_flag=True, help="Continue from the newest checkpoint."),
    click.option("--metrics", type=click.Path(), help="File of JSON lines to write."),
    click.option("--tensorboard", type=click.Path(), help="Folder for TensorBoard."),
    click.option("--log-every", type=_count, default=10, help="Steps between lines of metrics."),
    click.option("--quiet", is_flag=True, help="No progress."),
)
BITS: dict[str, int | str] = {"8": 8, "4": 4, "2": 2, "ternary": "ternary", "binary": "binary"}
QAT = (
    click.option(
        "--qat",
        is_flag=True,
        help="Train through quantization. A float MODEL is quantized first, and without --loss "
        "it is the teacher.",
    ),
    click.option(
        "--weight-bits",
        type=click.Choice(list(BITS)),
        help="With --qat; default: those of the quantized model, 8 for a float one.",
    ),
    click.option("--activation-bits", type=click.Choice(["8", "4"]), help="With --qat."),
    click.option(
        "--ends-in-8-bits/--no-ends-in-8-bits",
        default=None,
        help="First and last layer in 8 bits; the default for 4 bits and below.",
    ),
    click.option(
        "--calibration-batches",
        type=_count,
        default=32,
        show_default=True,
        help="Batches of the data for the ranges of a float MODEL.",
    ),
    click.option("--consumer", type=click.Choice(EXPORT[0][1]), help=EXPORT[0][2]),
)


def train_options(command: Any) -> Any:
    """The command with all options of training."""
    for option in reversed((*LOSS, *STEPS, *RUN, *QAT)):
        command = option(command)
    return command
