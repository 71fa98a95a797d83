"""`explain`: what the compiler did to a model, or to one node of it."""

from __future__ import annotations

from typing import Any

import click

import bitwright
from bitwright.cli.common import json_option, load, main, out, print_json, show_table, working


@main.command()
@click.argument("model")
@click.option("--node", default="", help="Follow one value by name.")
@click.option("--schedule", is_flag=True, help="Print every kernel call and buffer as well.")
@json_option
def explain(model: str, node: str, schedule: bool, as_json: bool) -> None:
    """Show what the compiler did to MODEL, or to one node of it."""
    from bitwright.report import explain as report

    exe = working("compiling")(bitwright.compile)(load(model))
    if node:
        return show_life(report.explain_node(exe.history, node), as_json)
    rows = report.explain_stages(exe.history)
    if as_json:
        return print_json([vars(row) for row in rows])
    show_table(
        exe.graph.name,
        ("stage", "nodes", "rules that fired", "rules refused"),
        ((r.stage, r.nodes, _counts(r.fired), _counts(r.refused)) for r in rows),
    )
    show_schedule(exe.engine.schedule, whole=schedule)


def show_schedule(schedule: Any, whole: bool) -> None:
    """How many steps are kernels, and which are not and why."""
    hosts = list(schedule.host_steps)
    kernels = len(schedule.steps) - len(hosts)
    out.print(f"{kernels} kernel calls, {len(hosts)} host steps", highlight=False)
    for step in hosts:
        line = f"host step: {step.op.op} %{step.node}: {step.why}"
        out.print(line, highlight=False, markup=False, soft_wrap=True)
    if whole:
        click.echo(str(schedule))


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{rule} {count}" for rule, count in counts.items())


def show_life(life: Any, as_json: bool) -> None:
    if as_json:
        return print_json(life.as_json())
    for stage, text in life.texts:
        out.print(f"[bold]{stage}[/]", highlight=False)
        out.print(f"  {text or '(gone)'}", highlight=False, markup=False, soft_wrap=True)
        for event in life.events:
            if event.stage == stage:
                out.print(f"  - {event}", highlight=False, markup=False, soft_wrap=True)
