"""`serve`: models behind OpenAI's interface."""

from __future__ import annotations

from typing import Any

import click

from bitwright.cli import common

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@common.main.command()
@click.argument("models", nargs=-1, required=True, metavar="[NAME=]MODEL...")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", default=8000, show_default=True, help="0 takes a free one.")
@click.option(
    "--api-key",
    envvar="BITWRIGHT_API_KEY",
    help="Key that clients must send; better given as BITWRIGHT_API_KEY.",
)
@click.option(
    "--allow-host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="A name, such as *.example.org, that clients may use for this server; without a key, "
    "only addresses and localhost are allowed.",
)
@click.option("--threads", type=click.IntRange(1), help="Default: one per core.")
@click.option("--context", type=click.IntRange(2), help="Positions of each sequence.")
@click.option(
    "--slots", type=click.IntRange(1), default=8, show_default=True, help="Sequences at once."
)
@click.option("--cache", default="f16", show_default=True, help="Element type of the cache.")
@click.option("--draft", help="`prompt`, or a smaller model, to guess tokens with.")
@click.option("--max-queue", type=click.IntRange(1), default=1000, show_default=True)
@click.option("--max-tokens", type=click.IntRange(1), default=4096, show_default=True)
@click.option("--max-seconds", type=click.FloatRange(0.1), default=600.0, show_default=True)
def serve(
    models: tuple[str, ...],
    host: str,
    port: int,
    api_key: str | None,
    threads: int | None,
    context: int | None,
    slots: int,
    cache: str,
    draft: str | None,
    **limits: Any,
) -> None:
    """Serve MODELs: language models and encoders as OpenAI does, others under /v1/infer.

    The page at / is a chat. SIGINT or SIGTERM ends the server when running requests are done.
    """
    from bitwright.llm.language_model import LanguageModel
    from bitwright.llm.serve.models import open_models
    from bitwright.llm.serve.run import bind, serve
    from bitwright.llm.serve.settings import Settings
    from bitwright.llm.text.library import need

    for package in ("starlette", "uvicorn"):
        need(package, "serve")
    if host not in LOOPBACK and not api_key:
        common.print_note(f"everybody who reaches {host} may use the server: there is no API key")
    if not api_key or limits["hosts"]:  # the name that is printed below
        limits["hosts"] = (*limits["hosts"], host)
    listening = bind(host, port)
    try:
        opened = common.working("loading")(open_models)(
            models, threads=threads, context=context, slots=slots, cache=cache
        )
        drafter: Any = draft
        if draft not in (None, "prompt"):
            longest = max((m.context for m in opened.values() if isinstance(m, LanguageModel)),
                          default=None)  # fmt: skip
            drafter = LanguageModel(draft, threads, longest)
        written = f"[{host}]" if ":" in host else host
        address = f"http://{written}:{listening.getsockname()[1]}"
        common.print_line(f"serving {', '.join(opened)} at {address}")
        serve(opened, listening, Settings(api_key=api_key or None, **limits), drafter)
    finally:
        listening.close()
