"""Which names a server answers to.

A page of another site can make its own name point to this machine (DNS rebinding), and then read
what the server says as if it were its own. Browsers say in `Host` which name they were sent to, so
names that nobody allowed are refused; addresses and localhost cannot be rebound.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from bitwright.llm.serve.http import error_response
from bitwright.llm.serve.settings import ApiError, Settings

App = Callable[[Any, Any, Any], Awaitable[None]]
ANY = "*"


def host_name(header: str) -> str:
    """The name of a `Host` header, in lower case, without its port and final dot."""
    name = header.strip().lower()
    if name.startswith("["):  # an IPv6 address
        return name[1:].partition("]")[0]
    return name.partition(":")[0].rstrip(".")


def is_allowed(name: str, allowed: Sequence[str]) -> bool:
    """Whether a name is an address, localhost, or allowed; `*.example.org` allows all below it."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        patterns = [host_name(pattern) for pattern in allowed]
        return any(
            pattern in (ANY, name) or (pattern.startswith("*.") and name.endswith(pattern[1:]))
            for pattern in patterns
        )
    return True


class HostCheck:
    """An ASGI application that refuses names that its settings do not allow.

    Without a list of names, an API key is enough: another site does not know it.
    """

    def __init__(self, app: App, settings: Settings) -> None:
        self.app, self.settings = app, settings

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        settings = self.settings
        is_open = settings.api_key is not None and not settings.hosts
        if scope["type"] == "http" and not is_open:
            given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
            wrong = [one for one in map(host_name, given) if not is_allowed(one, settings.hosts)]
            if wrong:
                response = error_response(
                    ApiError(
                        403,
                        f"this server does not answer to the name {wrong[0][:100]!r}; "
                        "`bitwright serve --allow-host NAME` allows one",
                        code="host_not_allowed",
                    )
                )
                return await response(scope, receive, send)  # type: ignore[no-any-return]
        await self.app(scope, receive, send)
