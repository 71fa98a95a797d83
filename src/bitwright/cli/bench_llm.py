"""`bench-llm`: prefill and decode of a language model, beside installed peers."""

from __future__ import annotations

import click

from bitwright.cli import common
from bitwright.cli.bench import parse_counts, parse_names


@common.main.command("bench-llm")
@click.argument("model", type=click.Path(exists=True))
@click.option("--contexts", default="256,2000", show_default=True, callback=parse_counts)
@click.option("--batches", default="1,4", show_default=True, callback=parse_counts)
@click.option("--threads", default="1,2", show_default=True, callback=parse_counts)
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1))
@click.option("--prompt", default=255, show_default=True, type=click.IntRange(1))
@click.option("--decoded", default=48, show_default=True, type=click.IntRange(1))
@click.option(
    "--against",
    default="llama.cpp",
    show_default=True,
    callback=parse_names,
    help="Peers to compare with, separated by commas; empty for none.",
)
@common.json_option
def bench_llm(
    model: str,
    contexts: list[int],
    batches: list[int],
    threads: list[int],
    rounds: int,
    prompt: int,
    decoded: int,
    against: list[str],
    as_json: bool,
) -> None:
    """Tokens per second of MODEL: prefill, and decode behind contexts and in batches.

    Bytes per token are the weights and caches that a decoded token reads; the last column compares
    their rate with the measured bandwidth of the memory.
    """
    from bitwright.report.llm_bench import bench_llm as measure

    found = common.working("measuring")(measure)(
        model, contexts, batches, threads, rounds, against, prompt, decoded
    )
    if as_json:
        common.print_json(found.to_json())
        return
    header = ("engine", "phase", "threads", "context", "batch", "tokens/s", "MB/token", "bandwidth")
    lines = []
    for row in found.rows:
        size = "" if row.bytes_per_token is None else f"{row.bytes_per_token / 1e6:.1f}"
        share = "" if row.bandwidth_share is None else f"{row.bandwidth_share:.0%}"
        numbers = (row.threads, row.context, row.batch)
        lines.append(
            (row.engine, row.what, *map(str, numbers), f"{row.tokens_per_second:.1f}", size, share)
        )
    common.show_table(found.model, header, lines)
