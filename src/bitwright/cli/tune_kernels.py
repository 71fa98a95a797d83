"""`tune-kernels`: measures kernel parameters on this machine and remembers the fastest."""

from __future__ import annotations

from typing import Any

import click

from bitwright.cli import common


@common.main.command("tune-kernels")
@click.argument("model")
@click.option("--budget", default=60.0, show_default=True, help="Seconds for the search.")
@click.option("--threads", type=click.IntRange(1), help="Default: the number of cores.")
@common.size_option
@common.precision_option
@click.option("--feeds", type=click.Path(), help=".npz with one array per input.")
@click.option("--forget", is_flag=True, help="First drop what was remembered for this machine.")
@common.json_option
def tune_kernels(
    model: str,
    budget: float,
    threads: int | None,
    sizes: dict[str, int],
    precision: str | None,
    feeds: str | None,
    forget: bool,
    as_json: bool,
) -> None:
    """Measure tiles and cache blocks of MODEL's kernels, and remember the fastest.

    Later compilations on this machine use them; results are the same bits. Inputs are random
    unless --feeds gives them.
    """
    from bitwright.backends.cpu.lowering import choices
    from bitwright.report.feeds import random_inputs, read_inputs
    from bitwright.target import host
    from bitwright.tuning.kernel_tuning import tune_kernels as tune

    if forget:
        choices.remember(host(), {})
    graph = common.load(model)
    given: Any = read_inputs(feeds, graph) if feeds else random_inputs(graph, sizes, seed=0)
    found = common.working("measuring")(tune)(
        graph, given, budget=budget, threads=threads, precision=precision
    )
    if as_json:
        return common.print_json(found.to_dict())
    common.print_line(str(found))
