"""What clients and files must not be able to do to a server and its models."""

import asyncio
import json

import numpy as np
import pytest

pytest.importorskip("tokenizers", reason="the tokenizers package is not installed")
pytest.importorskip("jinja2", reason="the jinja2 package is not installed")
import llm_models

from bitwright.errors import ImportModelError, RunError
from bitwright.frontend.language.source import TokenizerSource
from bitwright.llm.engine.session import load_session
from bitwright.llm.generation.generate import generate
from bitwright.llm.generation.options import Options
from bitwright.llm.generation.scheduler import GenerationError
from bitwright.llm.language_model import LanguageModel
from bitwright.llm.serve.app import Server
from bitwright.llm.serve.settings import Settings, api_error
from bitwright.llm.serve.worker import Worker
from bitwright.llm.text.gguf_tokenizer import MAX_MERGED, tokenizer_of_metadata
from bitwright.llm.text.source import read_tokenizer


@pytest.fixture(scope="module")
def wide_tokenizer():
    """A model whose tokenizer has tokens that its table has not."""
    made = LanguageModel(llm_models.model(), threads=1)
    data = llm_models.metadata()
    tokens, kinds = (data[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type"))
    more = {"tokens": [*tokens, "<|a|>", "<|b|>"], "token_type": [*kinds, 3, 3]}
    made.__dict__["tokenizer"] = read_tokenizer(llm_models.metadata(**more))
    assert made.tokenizer.vocabulary.size == made.engine.decoder.vocabulary + 2
    return made


def test_tokens_beyond_the_table_are_refused_before_they_run(wide_tokenizer):
    with pytest.raises(RunError, match="token 601 is not in the model's vocabulary"):
        generate(wide_tokenizer, [5, 601], max_tokens=2)
    assert wide_tokenizer.scheduler.steps == 0


def test_a_constraint_with_tokens_beyond_the_table(wide_tokenizer):
    pytest.importorskip("llguidance", reason="the llguidance package is not installed")
    assert generate(wide_tokenizer, [5, 6], max_tokens=4, regex="[a-c]{3}").text.strip("abc") == ""


@pytest.mark.parametrize("name", ["temperature", "seed", "top_k", "logprobs"])
def test_numbers_that_no_float_holds(name):
    for value in (10**400, -(10**400)):
        with pytest.raises(RunError, match=f"{name} is out of range"):
            Options(**{name: value})
    with pytest.raises(RunError, match="temperature is out of range"):
        Options(temperature=float("nan"))


def test_keys_of_messages_are_plain_text(lm):
    text = "{{ messages[0] | tojson }}"
    template = type(lm.chat_template)(text)
    message = {"role": "user", "content": "x", "<|im_end|>": {"<|im_end|>": 1}}
    rendered = template.render([message], guard=lm.tokenizer.guard)
    control = lm.tokenizer.vocabulary.control
    assert not control & set(lm.tokenizer.encode(rendered, special=True))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_tokenizers_of_folders_read_nothing_outside(name, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "secret")
    with pytest.raises(ImportModelError, match="leads out of its folder"):
        TokenizerSource(folder=folder).open()


def test_a_token_with_too_many_cuts():
    tokens = ["<unk>", "a", "a" * (MAX_MERGED + 1)]
    facts = {"model": "llama", "tokens": tokens, "scores": [0.0] * 3, "token_type": [2, 1, 1]}
    with pytest.raises(ImportModelError, match="token 2 is too long"):
        tokenizer_of_metadata({f"tokenizer.ggml.{key}": value for key, value in facts.items()})


def test_arrays_of_other_shapes_are_no_session(lm, tmp_path):
    path = tmp_path / "talk"
    facts = np.frombuffer(b"[" * 100_000, np.uint8)
    for tokens in (np.int32(1), np.zeros((2, 2), np.int32)):
        np.savez(path.open("wb"), facts=np.frombuffer(b"{}", np.uint8), tokens=tokens)
        with pytest.raises(ImportModelError):
            load_session(lm.engine, "x", path)
    np.savez(path.open("wb"), facts=facts, tokens=np.zeros(1, np.int32))
    with pytest.raises(ImportModelError):
        load_session(lm.engine, "x", path)


def test_failures_of_the_server_are_not_told():
    found = api_error(GenerationError("the generation failed: OSError: /home/someone"))
    assert (found.status, found.message) == (500, "the server failed")


async def _ask(app, path, body, headers=()):
    """Status and body of one request, without a socket."""
    sent, given = [], [{"type": "http.request", "body": body, "more_body": False}]

    async def receive():
        return given.pop() if given else await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    kind = (b"content-type", b"Application/JSON; charset=utf-8")
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(),
             "query_string": b"", "headers": [kind, *headers], "http_version": "1.1",
             "scheme": "http", "server": ("127.0.0.1", 1), "client": ("127.0.0.1", 2),
             "root_path": "", "asgi": {"version": "3.0", "spec_version": "2.3"}}  # fmt: skip
    await app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


@pytest.mark.parametrize(
    "change, status",
    [({"\ud800": 1}, 400), ({"seed": 10**400}, 400), ({"model": "\ud800"}, 404)],
    ids=["surrogate", "number", "model"],
)
def test_answers_to_strange_fields_are_json(lm, change, status):
    pytest.importorskip("starlette", reason="the starlette package is not installed")
    server = Server({"tiny": lm})
    body = json.dumps({"prompt": "a", "max_tokens": 1} | change).encode()
    found, text = asyncio.run(_ask(server.app(), "/v1/completions", body))
    assert found == status
    assert "message" in json.loads(text)["error"]
    asyncio.run(server.stop())


def test_runs_of_other_models_have_limits(lm):
    pytest.importorskip("starlette", reason="the starlette package is not installed")

    async def check():
        server = Server({"tiny": lm}, Settings(max_queue=2, max_seconds=0.05))
        await server._turns["tiny"].acquire()
        both = [asyncio.ensure_future(server._in_thread("tiny", int)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Exception, match="too many requests"):
            await server._in_thread("tiny", int)
        for error in await asyncio.gather(*both, return_exceptions=True):
            assert api_error(error).status == 504
        server._turns["tiny"].release()
        assert await server._in_thread("tiny", int) == 0
        await server.stop()

    asyncio.run(check())


def test_a_stream_that_never_begins_is_cancelled(lm):
    pytest.importorskip("starlette", reason="the starlette package is not installed")
    from bitwright.llm.serve.generating import _stream

    class Running:
        is_cancelled = False

        def cancel(self):
            self.is_cancelled = True

    async def events():
        yield b""

    async def send(message):
        raise OSError("the client has gone")

    async def receive():
        await asyncio.Event().wait()

    one = Running()
    scope = {"type": "http", "asgi": {"spec_version": "2.4"}}
    with pytest.raises(Exception):  # noqa: B017 - its kind is that of starlette's version
        asyncio.run(_stream(events(), [one])(scope, receive, send))
    assert one.is_cancelled


def test_a_job_that_comes_while_the_worker_stops_ends(lm):
    pieces = []
    worker = Worker(lm.scheduler)
    job = lm.job([5, 6], Options(max_tokens=100), pieces.append)
    add = lm.scheduler.add

    def add_late(one):
        worker.stop()
        add(one)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm.scheduler, "add", add_late)
        worker.submit(job)
    assert job.is_done
    assert pieces[-1].finish_reason == "cancelled"
