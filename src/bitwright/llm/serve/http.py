"""What every route needs: the key, the body within its limit, errors as JSON."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from bitwright.errors import BitwrightError
from bitwright.llm.serve.metrics import Metrics
from bitwright.llm.serve.settings import ApiError, Settings, api_error

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

Handler = Callable[["Request"], Awaitable["Response"]]
log = logging.getLogger("bitwright.serve")
_BODY_SECONDS = 60


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Any:
    """A response with compact JSON; a number that JSON lacks is an error."""
    from starlette.responses import Response

    return Response(json_bytes(value), status, headers, "application/json")


def json_bytes(value: Any) -> bytes:
    """Compact JSON in UTF-8; half of a surrogate pair becomes its escape."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8", "backslashreplace")


def error_response(error: ApiError) -> Any:
    return json_response(error.body(), error.status, error.headers)


def guarded(handler: Handler, name: str, settings: Settings, metrics: Metrics) -> Handler:
    """The handler behind the key; whatever it raises becomes an answer."""

    async def handle(request: Request) -> Response:
        begin = time.monotonic()
        try:
            check_key(request, settings)
            response = await handler(request)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if not isinstance(error, ApiError | BitwrightError):
                log.exception("%s failed", name)
            response = error_response(api_error(error))
        metrics.add("bitwright_requests_total", path=name, status=str(response.status_code))
        metrics.observe("bitwright_response_seconds", time.monotonic() - begin)
        return response

    return handle


def check_key(request: Request, settings: Settings) -> None:
    if settings.api_key is None:
        return
    given = request.headers.get("authorization", "")
    scheme, _, key = given.partition(" ")
    right = hmac.compare_digest(key.strip().encode(), settings.api_key.encode())
    if scheme.lower() != "bearer" or not right:
        raise ApiError(
            401,
            "the API key is missing or wrong; send it as Authorization: Bearer KEY",
            kind="authentication_error",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def content_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def read_body(request: Request, settings: Settings, *kinds: str) -> bytes:
    """The body, of one of the content types and within the limit.

    The content type is required: a page of another site cannot send it without asking first.
    """
    given = content_type(request)
    if given not in kinds:
        raise ApiError(415, f"the content type is {' or '.join(kinds)}, found {given[:80]!r}")
    too_large = ApiError(
        413, f"the body is larger than the {settings.max_body:,} bytes that this server allows"
    )
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > settings.max_body:
        raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > settings.max_body:
                    raise too_large
                parts.append(part)
    except TimeoutError:
        raise ApiError(408, "the body did not arrive in time") from None
    return b"".join(parts)


async def until_disconnect(request: Request) -> None:
    """Returns when the client has gone; only after the body was read."""
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            return
