"""/v1/chat/completions and /v1/completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from bitwright.errors import BitwrightError
from bitwright.llm.generation.job import Piece
from bitwright.llm.language_model import LanguageModel
from bitwright.llm.serve.answers import Answer
from bitwright.llm.serve.http import json_bytes, json_response, until_disconnect
from bitwright.llm.serve.metrics import Metrics
from bitwright.llm.serve.requests import GenerationRequest
from bitwright.llm.serve.settings import ApiError, Settings, api_error, too_many, too_slow
from bitwright.llm.serve.worker import Generating, Worker

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

_SILENCE = 15.0
"""Seconds after which a stream sends a comment, so that nobody thinks it is dead."""


class Generations:
    """Answers requests with one language model."""

    def __init__(
        self, lm: LanguageModel, name: str, settings: Settings, metrics: Metrics, draft: Any = None
    ) -> None:
        self.lm, self.name, self._settings, self._metrics = lm, name, settings, metrics
        self._draft = draft
        self.worker = Worker(lm.scheduler)
        self._preparing = 0

    async def answer(self, request: Request, asked: GenerationRequest, is_chat: bool) -> Response:
        """The whole answer, or a stream of server-sent events."""
        count = len(asked.prompts) * asked.choices
        self._require_room(count)
        self._preparing += count
        try:
            running = await self._start(asked, is_chat)
        finally:
            self._preparing -= count
        answer = Answer(
            self.name,
            self.lm.tokenizer.vocabulary,
            is_chat,
            asked.options.logprobs is not None,
            asked.choices,
        )
        if asked.is_stream:
            return _stream(self._events(running, answer, asked.has_usage), running)
        return await self._whole(request, running, answer)

    def _require_room(self, count: int) -> None:
        if not self.worker.is_alive:
            raise ApiError(503, "the server is shutting down", kind="server_error")
        if self.worker.load + self._preparing + count > self._settings.max_queue:
            raise too_many()

    async def _start(self, asked: GenerationRequest, is_chat: bool) -> list[Generating]:
        """Queue all answers of a request; an error in one queues none."""
        from starlette.concurrency import run_in_threadpool

        loop = asyncio.get_running_loop()

        def prepare() -> list[Generating]:
            made = []
            for prompt in asked.prompts:
                tokens = self.lm.chat_prompt(prompt) if is_chat else self.lm.prompt_tokens(prompt)
                for choice in range(asked.choices):
                    queue: asyncio.Queue[Piece] = asyncio.Queue()
                    job = self.lm.job(
                        tokens,
                        asked.options_of(choice),
                        _sender(loop, queue),
                        self.lm.drafter(self._draft),
                    )
                    made.append(Generating(job, self.worker, queue))
            for one in made:
                self.lm.scheduler.check(one.job)
            for one in made:
                self.worker.submit(one.job)
            return made

        return await run_in_threadpool(prepare)

    async def _whole(self, request: Request, running: list[Generating], answer: Answer) -> Response:
        async def collect(one: Generating) -> list[Piece]:
            return [piece async for piece in one.pieces()]

        tasks = [asyncio.ensure_future(collect(one)) for one in running]
        gone = asyncio.ensure_future(until_disconnect(request))
        everything = asyncio.gather(*tasks)
        try:
            async with asyncio.timeout(self._settings.max_seconds):
                either: list[asyncio.Future[Any]] = [everything, gone]
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not everything.done():
                raise ApiError(499, "the client has gone")
            choices = everything.result()
        except TimeoutError:
            raise too_slow(self._settings) from None
        finally:
            gone.cancel()
            everything.cancel()
            for one in running:
                one.cancel()
            self._count(running)
        for pieces in choices:
            _require_success(pieces[-1])
        return json_response(answer.whole(choices, [one.job.counts for one in running]))  # type: ignore[no-any-return]

    async def _events(
        self, running: list[Generating], answer: Answer, has_usage: bool
    ) -> AsyncIterator[bytes]:
        """Server-sent events of all answers, as their pieces come."""
        merged: asyncio.Queue[tuple[int, Piece]] = asyncio.Queue()

        async def follow(index: int, one: Generating) -> None:
            async for piece in one.pieces():
                merged.put_nowait((index, piece))

        begin = time.monotonic()
        tasks = [asyncio.ensure_future(follow(i, one)) for i, one in enumerate(running)]
        try:
            if answer.is_chat:
                for index in range(len(running)):
                    yield _event(answer.first(index))
            left = len(running)
            while left:
                rest = self._settings.max_seconds - (time.monotonic() - begin)
                if rest <= 0:
                    raise too_slow(self._settings)
                try:
                    async with asyncio.timeout(min(rest, _SILENCE)):
                        index, piece = await merged.get()
                except TimeoutError:
                    yield b": waiting\n\n"
                    continue
                _require_success(piece)
                left -= piece.finish_reason is not None
                if piece.text or piece.logprobs or piece.finish_reason:
                    yield _event(answer.chunk(index, piece))
            if has_usage:
                yield _event(answer.last([one.job.counts for one in running]))
            yield b"data: [DONE]\n\n"
        except (ApiError, BitwrightError) as error:
            yield _event(api_error(error).body())
        finally:
            for task in tasks:
                task.cancel()
            for one in running:
                one.cancel()
            self._count(running)

    def _count(self, running: list[Generating]) -> None:
        add = self._metrics.add
        for one in running:
            counts = one.job.counts
            add("bitwright_prompt_tokens_total", counts.prompt)
            add("bitwright_cached_tokens_total", counts.reused)
            add("bitwright_generated_tokens_total", counts.generated)


def _stream(events: AsyncIterator[bytes], running: list[Generating]) -> Response:
    """A response whose end also cancels generations that it never began to send."""
    from starlette.responses import StreamingResponse

    class Events(StreamingResponse):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            try:
                await super().__call__(scope, receive, send)
            finally:
                for one in running:
                    one.cancel()

    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return Events(events, 200, headers, "text/event-stream")


def _sender(
    loop: asyncio.AbstractEventLoop, queue: asyncio.Queue[Piece]
) -> Callable[[Piece], None]:
    """Passes pieces from the worker's thread to the event loop."""

    def send(piece: Piece) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(queue.put_nowait, piece)

    return send


def _event(value: Any) -> bytes:
    return b"data: " + json_bytes(value) + b"\n\n"


def _require_success(piece: Piece) -> None:
    if piece.error is not None:
        raise piece.error
    if piece.finish_reason == "cancelled":
        raise ApiError(503, "the server is shutting down", kind="server_error")
