"""The routes of the server, as an ASGI application.

app = make_app({"smollm": LanguageModel("model.gguf", slots=8)})
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import cache, partial
from importlib import resources
from typing import TYPE_CHECKING, Any, TypeVar

from bitwright.errors import BitwrightError
from bitwright.executable import Executable
from bitwright.llm.embeddings import Embedder
from bitwright.llm.language_model import LanguageModel
from bitwright.llm.serve.embedding import embedding_answer
from bitwright.llm.serve.fields import parse_body
from bitwright.llm.serve.generating import Generations
from bitwright.llm.serve.hosts import HostCheck
from bitwright.llm.serve.http import (
    content_type,
    error_response,
    guarded,
    json_response,
    read_body,
)
from bitwright.llm.serve.inference import read_json, read_npz, signature, write_json, write_npz
from bitwright.llm.serve.metrics import Metrics
from bitwright.llm.serve.requests import chat_request, completion_request
from bitwright.llm.serve.settings import ApiError, Settings, too_many, too_slow
from bitwright.llm.text.library import need

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

Model = LanguageModel | Embedder | Executable
_JSON, _NPZ = "application/json", "application/x-npz"
_PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
T = TypeVar("T")


class Server:
    """Models by name, and handlers of the routes."""

    def __init__(
        self, models: Mapping[str, Model], settings: Settings | None = None, draft: Any = None
    ) -> None:
        self.settings = settings or Settings()
        self.metrics = Metrics()
        self._models = dict(models)
        self._created = int(time.time())
        self._declare()
        self.generations = {
            name: Generations(model, name, self.settings, self.metrics, draft)
            for name, model in models.items()
            if isinstance(model, LanguageModel)
        }
        self._locks = {name: threading.Lock() for name in models}
        self._turns = {name: asyncio.Lock() for name in models}
        self._queued = dict.fromkeys(models, 0)

    def _declare(self) -> None:
        metrics = self.metrics
        counter = metrics.counter
        counter("bitwright_requests_total", "Requests by path and status.")
        counter("bitwright_prompt_tokens_total", "Tokens of prompts.")
        counter("bitwright_cached_tokens_total", "Tokens of prompts that were in the cache.")
        counter("bitwright_generated_tokens_total", "Tokens generated.")
        metrics.histogram("bitwright_response_seconds", "Time until a response began.")
        gauges: dict[str, tuple[str, Callable[[Generations], float]]] = {
            "active": ("Generations that run.", lambda g: g.lm.scheduler.active),
            "waiting": ("Generations that wait.", lambda g: g.lm.scheduler.waiting),
            "steps": ("Runs of the model.", lambda g: g.lm.scheduler.steps),
            "rows": ("Rows in these runs.", lambda g: g.lm.scheduler.rows),
        }
        for name, (text, read) in gauges.items():
            metrics.gauge(f"bitwright_{name}", text, partial(self._sum, read))

    def _sum(self, read: Callable[[Generations], float]) -> float:
        return sum(map(read, self.generations.values()))

    def _find(self, name: Any, kind: type[T], what: str) -> tuple[str, T]:
        """The model that a request names; without a name the only one of its kind."""
        if name is None:
            fitting = [n for n, model in self._models.items() if isinstance(model, kind)]
            if len(fitting) != 1:
                raise ApiError(400, "the request names no model", param="model")
            name = fitting[0]
        model = self._models.get(name) if isinstance(name, str) else None
        if model is None:
            raise ApiError(
                404,
                f"there is no model {str(name)[:100]!r}; this server has {', '.join(self._models)}",
                param="model",
                code="model_not_found",
            )
        if not isinstance(model, kind):
            raise ApiError(400, f"the model {name!r} {what}", param="model")
        return name, model

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, is_chat=True)

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, is_chat=False)

    async def _generate(self, request: Request, is_chat: bool) -> Response:
        body = parse_body(await read_body(request, self.settings, _JSON))
        name, _ = self._find(body.get("model"), LanguageModel, "generates no text")
        make = chat_request if is_chat else completion_request
        return await self.generations[name].answer(request, make(body, self.settings), is_chat)

    async def embeddings(self, request: Request) -> Response:
        body = parse_body(await read_body(request, self.settings, _JSON))
        asked = body.get("model")
        has_own = asked is None and any(isinstance(m, Embedder) for m in self._models.values())
        kinds: Any = Embedder if has_own else (Embedder, LanguageModel)
        name, model = self._find(asked, kinds, "makes no embeddings")

        end = time.monotonic() + self.settings.max_seconds

        def check() -> None:
            if time.monotonic() > end:
                raise too_slow(self.settings)

        def run() -> Any:
            embedder = model.embedder if isinstance(model, LanguageModel) else model
            return embedding_answer(embedder, body, check)

        return json_response(await self._in_thread(name, run))  # type: ignore[no-any-return]

    async def infer(self, request: Request) -> Response:
        """Runs a compiled model; a GET says what it takes."""
        query = request.query_params.get("model")
        if request.method == "GET":
            name, model = self._find(query, Executable, "is run by another route")
            return json_response({"model": name} | signature(model))  # type: ignore[no-any-return]
        kinds = (_JSON, _NPZ, "application/octet-stream")
        data = await read_body(request, self.settings, *kinds)
        is_json = content_type(request) == _JSON
        if is_json and query is None:
            query = parse_body(data).get("model")
        name, model = self._find(query, Executable, "is run by another route")

        def run() -> Any:
            feeds = read_json(data, model) if is_json else read_npz(data, self.settings)
            model.reset()  # one request does not see the state of another
            outputs = model.run(feeds)
            return write_json(outputs) if is_json else write_npz(outputs)

        found = await self._in_thread(name, run)
        if is_json:
            return json_response(found)  # type: ignore[no-any-return]
        from starlette.responses import Response

        return Response(found, media_type=_NPZ)

    async def _in_thread(self, name: str, run: Callable[[], Any]) -> Any:
        """Runs of one model wait for each other, within the limits, and hold no thread."""
        from starlette.concurrency import run_in_threadpool

        def locked() -> Any:
            with self._locks[name]:  # a run whose request was cancelled may still go on
                return run()

        if self._queued[name] >= self.settings.max_queue:
            raise too_many()
        self._queued[name] += 1
        try:
            try:
                async with asyncio.timeout(self.settings.max_seconds):
                    await self._turns[name].acquire()
            except TimeoutError:
                raise too_slow(self.settings) from None
            try:
                return await run_in_threadpool(locked)
            finally:
                self._turns[name].release()
        finally:
            self._queued[name] -= 1

    async def models(self, request: Request) -> Response:
        listed = [self._facts(name) for name in self._models]
        return json_response({"object": "list", "data": listed})  # type: ignore[no-any-return]

    async def model(self, request: Request) -> Response:
        name, _ = self._find(request.path_params["name"], object, "")
        return json_response(self._facts(name))  # type: ignore[no-any-return]

    def _facts(self, name: str) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "bitwright",
        }
        model = self._models[name]
        if isinstance(model, LanguageModel):
            facts |= {"context": model.context, "chat": _chats(model)}
        return facts

    async def health(self, request: Request) -> Response:
        is_well = all(one.worker.is_alive for one in self.generations.values())
        return json_response({"status": "ok" if is_well else "stopping"}, 200 if is_well else 503)  # type: ignore[no-any-return]

    async def show_metrics(self, request: Request) -> Response:
        from starlette.responses import PlainTextResponse

        return PlainTextResponse(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def page(self, request: Request) -> Response:
        from starlette.responses import HTMLResponse

        headers = {"Content-Security-Policy": _PAGE_POLICY, "X-Content-Type-Options": "nosniff"}
        return HTMLResponse(chat_page(), headers=headers)

    async def stop(self) -> None:
        """End all generations and their threads."""
        loop = asyncio.get_running_loop()
        for one in self.generations.values():
            await loop.run_in_executor(None, one.worker.stop)

    def app(self) -> Starlette:
        """The ASGI application."""
        need("starlette", "serve")
        from starlette.applications import Starlette
        from starlette.exceptions import HTTPException
        from starlette.middleware import Middleware
        from starlette.routing import Route

        def route(path: str, handler: Any, *methods: str) -> Any:
            made = guarded(handler, path, self.settings, self.metrics)
            return Route(path, made, methods=list(methods))

        @asynccontextmanager
        async def lifespan(app: Any) -> AsyncIterator[None]:
            yield
            await self.stop()

        async def other(request: Request, error: Exception) -> Response:
            status = getattr(error, "status_code", 500)
            what = {404: "there is no such path", 405: "the path has another method"}
            text = f"{what.get(status, 'the request failed')}: {request.method} {request.url.path}"
            return error_response(ApiError(status, text[:300]))  # type: ignore[no-any-return]

        return Starlette(
            routes=[
                route("/v1/chat/completions", self.chat, "POST"),
                route("/v1/completions", self.completions, "POST"),
                route("/v1/embeddings", self.embeddings, "POST"),
                route("/v1/infer", self.infer, "GET", "POST"),
                route("/v1/models", self.models, "GET"),
                route("/v1/models/{name:path}", self.model, "GET"),
                route("/metrics", self.show_metrics, "GET"),
                Route("/health", self.health),
                Route("/", self.page),
            ],
            exception_handlers={HTTPException: other},
            middleware=[Middleware(HostCheck, self.settings)],
            lifespan=lifespan,
        )


def _chats(model: LanguageModel) -> bool:
    """Whether the model has a chat template that can be used."""
    try:
        return model.chat_template is not None
    except BitwrightError:
        return False


@cache
def chat_page() -> str:
    """The chat page: one HTML file without other resources."""
    return (resources.files("bitwright.llm.serve") / "chat.html").read_text(encoding="utf-8")


def make_app(
    models: Mapping[str, Model], settings: Settings | None = None, draft: Any = None
) -> Starlette:
    """An ASGI application that serves models by name."""
    return Server(models, settings, draft).app()
