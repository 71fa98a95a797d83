"""Limits of a server, and errors as clients see them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bitwright.errors import BitwrightError
from bitwright.llm.generation.scheduler import GenerationError


@dataclass(frozen=True)
class Settings:
    """What a server allows."""

    api_key: str | None = None
    """Clients must send it as `Authorization: Bearer KEY`; None lets everybody in."""
    hosts: tuple[str, ...] = ()
    """Names that the server answers to, besides addresses and localhost; `*` for every name."""
    max_queue: int = 1000
    """Generations that wait or run at once; more are refused with status 429."""
    max_tokens: int = 4096
    """Largest number of tokens of one answer."""
    default_tokens: int = 512
    """Tokens of an answer whose request names no limit."""
    max_seconds: float = 600.0
    """Time of one request, waiting included."""
    max_body: int = 16 << 20
    """Bytes of a request, and of the arrays that it unpacks to."""
    max_choices: int = 16
    """Answers of one request: its prompts times its `n`."""
    shutdown_seconds: float = 30.0
    """Time that running requests get when the server stops."""


class ApiError(Exception):
    """An error that a client gets as JSON, in OpenAI's form."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind = status, message, kind
        self.code, self.param, self.headers = code, param, headers or {}

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


def too_many() -> ApiError:
    return ApiError(
        429,
        "too many requests wait already",
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        headers={"Retry-After": "2"},
    )


def too_slow(settings: Settings) -> ApiError:
    text = f"the request took more than {settings.max_seconds:g} s"
    return ApiError(504, text, kind="server_error", code="timeout")


def api_error(error: BaseException) -> ApiError:
    """What a client gets for an exception; only our own messages reach it."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, BitwrightError) and not isinstance(error, GenerationError):
        is_long = "fit the context" in error.what
        code = "context_length_exceeded" if is_long else None
        return ApiError(400, str(error), code=code, param=error.where or None)
    return ApiError(500, "the server failed", kind="server_error", code="internal_error")
