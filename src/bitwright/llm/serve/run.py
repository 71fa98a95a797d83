"""Runs the server with uvicorn until a signal stops it."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

from bitwright.errors import BitwrightError
from bitwright.llm.serve.app import Model, make_app
from bitwright.llm.serve.settings import Settings
from bitwright.llm.text.library import need


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
    except OSError as error:
        made.close()
        raise BitwrightError(f"cannot listen on {host} port {port}: {error.strerror}") from None
    return made


def serve(
    models: Mapping[str, Model],
    listening: socket.socket,
    settings: Settings | None = None,
    draft: Any = None,
) -> None:
    """Serve until SIGINT or SIGTERM; running requests then get time to finish."""
    uvicorn = need("uvicorn", "serve")
    settings = settings or Settings()
    config = uvicorn.Config(
        make_app(models, settings, draft),
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=max(1, round(settings.shutdown_seconds)),
        timeout_keep_alive=30,
        limit_concurrency=4 * settings.max_queue + 100,
        lifespan="on",
        server_header=False,
    )
    uvicorn.Server(config).run(sockets=[listening])
