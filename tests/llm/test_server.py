"""The server, through the official client where it has a method."""

import contextlib
import io
import json
import re
import socket
import struct
import threading
import time

import numpy as np
import pytest

pytest.importorskip("tokenizers", reason="the tokenizers package is not installed")
pytest.importorskip("jinja2", reason="the jinja2 package is not installed")
pytest.importorskip("starlette", reason="the starlette package is not installed")
pytest.importorskip("uvicorn", reason="the uvicorn package is not installed")
pytest.importorskip("httpx", reason="the httpx package is not installed")
pytest.importorskip("openai", reason="the openai package is not installed")
import httpx
import llm_models
import openai
from running_server import running

import bitwright as bw
from bitwright.llm.embeddings import Embedder
from bitwright.llm.generation.generate import generate
from bitwright.llm.serve.settings import Settings, api_error

PROMPT = "The statement with a prefix"
TALK = [{"role": "user", "content": "hello <|im_end|>"}]


class Encoder:
    """As `load_encoder` returns it: the mean of embeddings."""

    name, config = "encoder", Settings  # any object with attributes

    def __init__(self):
        self.tokenizer_source = llm_models.metadata()
        self.config = type("Config", (), {"context": 32, "vocab": 600})
        b = bw.Builder("encoder")
        tokens, mask = b.input("tokens", "i32[b, s]"), b.input("mask", "i32[b, s]")
        table = np.random.default_rng(0).normal(0, 1, (600, 8)).astype(np.float32)
        x = b.gather(b.parameter("table", table), tokens, axis=0)
        shares = b.cast(mask, to=bw.dtype("f32"))
        n, s = tokens.tensor.shape
        total = b.reduce_sum(b.mul(x, b.reshape(shares, shape=[n, s, 1])), axes=[1], keepdims=False)
        count = b.reduce_sum(shares, axes=[1], keepdims=True)
        self.table, self.graph = table, b.build(embedding=b.div(total, count))


def other_model():
    b = bw.Builder("other")
    x, n = b.input("x", "f32[n, 3]"), b.input("n", "i64[n]")
    return b.build(y=b.div(1.0, x), m=b.add(n, 1))


@pytest.fixture(scope="module")
def served(lm_wide):
    """A server with every kind of model."""
    models = {
        "tiny": lm_wide,
        "encoder": Embedder(Encoder(), threads=1),
        "other": bw.compile(other_model(), threads=1),
    }
    with running(models, max_queue=40, max_tokens=150, max_body=100_000) as found:
        yield found


@pytest.fixture
def address(served):
    return served[1]


@pytest.fixture
def client(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as found:
        yield found


def chat(client, **options):
    return client.chat.completions.create(
        **{"model": "tiny", "messages": TALK, "temperature": 0, "max_tokens": 12} | options
    )


def test_chat(client, lm):
    found = chat(client)
    truth = generate(lm, TALK, max_tokens=12)
    assert found.choices[0].message.content == truth.text
    assert found.choices[0].finish_reason == "length" and found.object == "chat.completion"
    assert found.usage.completion_tokens == 12
    assert found.usage.prompt_tokens == truth.counts.prompt
    again = chat(client)
    assert again.usage.prompt_tokens_details.cached_tokens == truth.counts.prompt - 1


def test_chat_streams(client):
    whole = chat(client).choices[0].message.content
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole and len(chunks) > 5
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 12 and not chunks[-1].choices


def test_seeds_and_several_answers(client):
    options = {"temperature": 1.3, "seed": 11, "n": 3}
    first, again = chat(client, **options), chat(client, **options)
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in again.choices]
    assert len(set(texts)) == 3 and [c.index for c in first.choices] == [0, 1, 2]
    assert first.usage.completion_tokens == 36
    streamed = {0: "", 1: "", 2: ""}
    for chunk in chat(client, **options, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert list(streamed.values()) == texts
    assert chat(client, temperature=1.3).id != chat(client, temperature=1.3).id


def test_logprobs(client, lm):
    found = chat(client, logprobs=True, top_logprobs=3).choices[0]
    truth = generate(lm, TALK, max_tokens=12, logprobs=3)
    listed = found.logprobs.content
    assert [one.logprob for one in listed] == pytest.approx([o.logprob for o in truth.logprobs])
    assert all(len(one.top_logprobs) == 3 for one in listed)
    assert bytes(b for one in listed for b in one.bytes).decode(errors="replace") == truth.text
    streamed = [
        one
        for chunk in chat(client, logprobs=True, stream=True)
        if chunk.choices and chunk.choices[0].logprobs
        for one in chunk.choices[0].logprobs.content
    ]
    assert [one.logprob for one in streamed] == [one.logprob for one in listed]
    older = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=6, temperature=0, logprobs=2
    ).choices[0]
    assert len(older.logprobs.tokens) == len(older.logprobs.token_logprobs) == 6
    assert older.logprobs.text_offset[0] == 0 and len(older.logprobs.top_logprobs[0]) == 2


def test_completions(client, lm):
    truth = [generate(lm, one, max_tokens=9).text for one in (PROMPT, "x y")]

    def complete(prompt, **options):
        found = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=9, temperature=0, **options
        )
        return [choice.text for choice in found.choices]

    assert complete(PROMPT) == truth[:1]
    assert complete([PROMPT, "x y"]) == truth
    assert complete(lm.tokenize(PROMPT)) == truth[:1]
    assert complete([lm.tokenize(PROMPT), lm.tokenize("x y")]) == truth
    stop = truth[0][4:7]
    assert complete(PROMPT, stop=[stop]) == [truth[0][: truth[0].index(stop)]]
    streamed = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=9, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in streamed) == truth[0]


def test_constrained_answers(client):
    pytest.importorskip("llguidance", reason="the llguidance package is not installed")
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 2]}},
        "required": ["ok", "n"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    for seed in range(3):
        found = chat(client, response_format=form, temperature=2, seed=seed, max_tokens=60)
        value = json.loads(found.choices[0].message.content)
        assert isinstance(value["ok"], bool) and value["n"] in (1, 2)
        assert found.choices[0].finish_reason == "stop"
    text = chat(client, response_format={"type": "json_object"}).choices[0].message.content
    assert text.startswith("{")
    found = chat(client, extra_body={"regex": "[0-9]{3}-[a-c]+!"}, max_tokens=50)
    assert re.match("[0-9]{3}-[a-c]+", found.choices[0].message.content)
    with pytest.raises(openai.BadRequestError, match="schema cannot be used"):
        bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "wrong"}}}
        chat(client, response_format=bad)


def test_embeddings(client, lm):
    encoder = Encoder()
    texts = ["The statement", "x", "a longer text of words"]
    truth = [encoder.table[[0, *lm.tokenize(text), 2]].mean(0) for text in texts]
    found = client.embeddings.create(model="encoder", input=texts)  # base64
    np.testing.assert_allclose([one.embedding for one in found.data], truth, rtol=1e-4, atol=1e-6)
    plain = client.embeddings.create(model="encoder", input="x", encoding_format="float")
    np.testing.assert_allclose(plain.data[0].embedding, truth[1], rtol=1e-4, atol=1e-6)
    tokens = client.embeddings.create(model="encoder", input=[5, 6], encoding_format="float")
    np.testing.assert_allclose(tokens.data[0].embedding, encoder.table[[5, 6]].mean(0), rtol=1e-4)
    assert tokens.usage.total_tokens == 2
    for wrong in ({"input": []}, {"input": "word " * 40}, {"input": "x", "dimensions": 3}):
        with pytest.raises(openai.BadRequestError):
            client.embeddings.create(model="encoder", **wrong)
    with pytest.raises(openai.BadRequestError, match="makes no embeddings"):
        client.embeddings.create(model="tiny", input="x")


def test_models(client):
    assert [one.id for one in client.models.list()] == ["tiny", "encoder", "other"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="there is no model 'none'"):
        client.models.retrieve("none")


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"model": "none"}, openai.NotFoundError, "there is no model 'none'; this server has tiny"),
        ({"model": "other"}, openai.BadRequestError, "generates no text"),
        ({"messages": []}, openai.BadRequestError, "at least one message"),
        ({"messages": "hi"}, openai.BadRequestError, "messages is list, found str"),
        ({"messages": [{"role": 1}]}, openai.BadRequestError, "an object with a role"),
        ({"temperature": -1}, openai.BadRequestError, "temperature is out of range"),
        ({"temperature": "hot"}, openai.BadRequestError, "temperature is int or float, found str"),
        ({"max_tokens": 151}, openai.BadRequestError, "this server allows 150, found 151"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens is out of range"),
        ({"n": 17}, openai.BadRequestError, "are 1 to 16 on this server"),
        ({"n": True}, openai.BadRequestError, "n is int, found bool"),
        ({"top_logprobs": 3}, openai.BadRequestError, "needs logprobs"),
        ({"logit_bias": {"x": 1}}, openai.BadRequestError, "keys of logit_bias are tokens"),
        ({"logit_bias": {"6000": 1}}, openai.BadRequestError, "token 6000 is not in"),
        ({"stop": [""]}, openai.BadRequestError, "stop strings are texts"),
        ({"tools": [{"type": "function"}]}, openai.BadRequestError, "tools is not supported"),
        ({"extra_body": {"topk": 3}}, openai.BadRequestError, "there is no field 'topk'"),
        ({"response_format": {"type": "xml"}}, openai.BadRequestError, "of type text, json_"),
        ({"messages": [{"role": "user", "content": "ab " * 500}]}, openai.BadRequestError,
         "does not fit the context; expected at most 159 tokens"),
        ({"messages": [{"role": "user", "content": "a" * 100_001}]}, openai.APIStatusError,
         "larger than the 100,000 bytes"),
    ],
)  # fmt: skip
def test_requests_that_are_wrong(client, options, error, message):
    with pytest.raises(error, match=message) as caught:
        chat(client, **options)
    assert caught.value.body["type"] == "invalid_request_error"
    assert chat(client, max_tokens=1).choices


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    "body, headers, status, message",
    [
        (b"{", JSON, 400, "the body is not JSON"),
        (b"\xff{}", JSON, 400, "the body is not UTF-8 at byte 0"),
        (b"[1]", JSON, 400, "not a JSON object"),
        (b"[" * 90_000, JSON, 400, "the body is not JSON"),
        (b"{}", {}, 415, "the content type is application/json"),
        (b"{}", {"content-type": "text/plain"}, 415, "found 'text/plain'"),
        (b"{}", JSON, 400, "'messages' is missing"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', JSON, 400, "surrogate"),
        (b'{"messages": [{"role": "user", "content": "x"}], "seed": 1e999}', JSON, 400, "seed"),
        (b'{"temperature": NaN, "messages": [{"role": "user"}]}', JSON, 400, "temperature"),
    ],
)
def test_bodies_that_are_wrong(address, body, headers, status, message):
    found = httpx.post(f"{address}/v1/chat/completions", content=body, headers=headers)
    assert found.status_code == status and message in found.json()["error"]["message"]


def test_paths_and_methods_that_are_wrong(address):
    assert httpx.get(f"{address}/v1/nothing").json()["error"]["message"].startswith("there is no")
    found = httpx.get(f"{address}/v1/chat/completions")
    assert found.status_code == 405 and "error" in found.json()


def test_infer(address):
    url = f"{address}/v1/infer"
    facts = httpx.get(url).json()
    assert facts["inputs"] == {"x": "f32[n, 3]", "n": "i64[n]"} and facts["model"] == "other"
    inputs = {"x": [[1, 2, 0]], "n": [41]}
    found = httpx.post(url, json={"inputs": inputs}).json()
    assert found == {"outputs": {"y": [[1.0, 0.5, None]], "m": [42]}}
    file = io.BytesIO()
    np.savez(file, x=np.full((2, 3), 4, np.float32), n=np.array([1, 2]))
    answer = httpx.post(
        f"{url}?model=other", content=file.getvalue(), headers={"content-type": "application/x-npz"}
    )
    with np.load(io.BytesIO(answer.content), allow_pickle=False) as arrays:
        np.testing.assert_array_equal(arrays["y"], np.full((2, 3), 0.25, np.float32))
        np.testing.assert_array_equal(arrays["m"], [2, 3])


def npz(**arrays):
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


@pytest.mark.parametrize(
    "content, kind, status",
    [
        (b"PK\x03\x04 and so on", "application/x-npz", 400),
        (npz(x=np.zeros(1 << 20)), "application/x-npz", 413),
        (npz(x=np.array([object()], object)), "application/x-npz", 400),
        (npz(x=np.zeros((1, 4), np.float32), n=np.zeros(1, np.int64)), "application/x-npz", 400),
        (b'{"inputs": {"x": [[1, 2], [3]], "n": [1]}}', "application/json", 400),
        (b'{"inputs": {"x": "text", "n": [1]}}', "application/json", 400),
        (b'{"inputs": {"z": [1]}}', "application/json", 400),
        (b'{"inputs": [1]}', "application/json", 400),
        (b'{"inputs": {}, "model": "tiny"}', "application/json", 400),
    ],
)
def test_arrays_that_are_wrong(address, content, kind, status):
    found = httpx.post(f"{address}/v1/infer", content=content, headers={"content-type": kind})
    assert found.status_code == status and found.json()["error"]["message"]


def wait_until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_client_that_leaves_ends_its_generations(served, client):
    server, address = served
    scheduler = server.generations["tiny"].lm.scheduler
    body = {"model": "tiny", "messages": TALK, "max_tokens": 130, "n": 8, "ignore_eos": True}
    for is_stream in (True, False):
        data = json.dumps(body | {"stream": is_stream}).encode()
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
            raw.sendall(head.encode() + data)
            wait_until(lambda: scheduler.active > 0)
        wait_until(lambda: scheduler.active + scheduler.waiting == 0)
    assert chat(client).choices[0].finish_reason == "length"


def test_many_requests_at_once(served, client):
    """Some are refused when the queue is full; the others get what they would get alone."""
    truth = chat(client, max_tokens=8).choices[0].message.content
    found, refused = [], []

    def ask():
        try:
            found.append(chat(client, max_tokens=8).choices[0].message.content)
        except openai.RateLimitError as error:
            refused.append(error.response.headers["retry-after"])

    worker = served[0].generations["tiny"].worker
    threads = [threading.Thread(target=ask) for _ in range(80)]
    with worker.scheduler.engine.lock:  # nothing runs before all have asked
        for one in threads:
            one.start()
        wait_until(lambda: len(refused) == 40 and worker.load == 40)
    for one in threads:
        one.join()
    assert found == [truth] * 40 and refused == ["2"] * 40


def test_one_bad_request_leaves_the_others_alone(client):
    truth = chat(client, max_tokens=60).choices[0].message.content
    stream = chat(client, max_tokens=60, stream=True)
    text = next(stream).choices[0].delta.content
    for wrong in ({"temperature": -1}, {"messages": [{"role": "user", "content": "ab " * 500}]}):
        with pytest.raises(openai.BadRequestError):
            chat(client, **wrong)
    assert text + "".join(c.choices[0].delta.content or "" for c in stream) == truth


def test_metrics_and_health(client, address):
    chat(client)
    found = httpx.get(f"{address}/metrics")
    assert found.headers["content-type"].startswith("text/plain")
    values = dict(line.rsplit(" ", 1) for line in found.text.splitlines() if line[0] != "#")
    assert float(values["bitwright_generated_tokens_total"]) > 0
    assert float(values['bitwright_requests_total{path="/v1/chat/completions",status="200"}']) > 0
    assert float(values["bitwright_response_seconds_count"]) > 0
    assert float(values["bitwright_active"]) >= 0
    assert httpx.get(f"{address}/health").json() == {"status": "ok"}


def test_the_key(lm):
    with running({"tiny": lm}, api_key="secret", default_tokens=3) as (_, address):
        for key in ("wrong", "secret2"):
            with (
                openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0) as client,
                pytest.raises(openai.AuthenticationError, match="missing or wrong"),
            ):
                chat(client)
        with openai.OpenAI(base_url=f"{address}/v1", api_key="secret") as client:
            assert chat(client).choices
            assert chat(client, max_tokens=openai.NOT_GIVEN).usage.completion_tokens == 3
        for path, status in (("metrics", 401), ("v1/models", 401), ("health", 200), ("", 200)):
            assert httpx.get(f"{address}/{path}").status_code == status


def test_the_time_limit(lm):
    with running({"tiny": lm}, max_seconds=0.01) as (_, address):
        slow = {"messages": TALK, "max_tokens": 4000, "n": 8, "ignore_eos": True}
        found = httpx.post(f"{address}/v1/chat/completions", json=slow, timeout=30)
        assert found.status_code == 504 and found.json()["error"]["code"] == "timeout"
        streamed = httpx.post(
            f"{address}/v1/chat/completions", json=slow | {"stream": True}, timeout=30
        )
        last = json.loads(streamed.text.strip().splitlines()[-1].removeprefix("data: "))
        assert last["error"]["code"] == "timeout"


def test_shutdown_ends_streams(lm):
    """The running stream ends with an error, and the thread of the model ends."""
    with contextlib.ExitStack() as stack:
        server, address = stack.enter_context(running({"tiny": lm}))
        body = {"messages": TALK, "max_tokens": 4000, "stream": True, "n": 8, "ignore_eos": True}
        with httpx.stream("POST", f"{address}/v1/chat/completions", json=body, timeout=30) as one:
            lines = one.iter_lines()
            next(lines)
            worker = server.generations["tiny"].worker
            worker.stop()
            assert not worker.is_alive
            assert any("shutting down" in line for line in lines)
        refused = httpx.post(f"{address}/v1/chat/completions", json={"messages": TALK})
        assert refused.status_code == 503
        assert httpx.get(f"{address}/health").status_code == 503


def test_speculation_does_not_change_answers(lm, client):
    with (
        running({"tiny": lm}, draft="prompt") as (_, address),
        openai.OpenAI(base_url=f"{address}/v1", api_key="none") as other,
    ):
        for options in ({}, {"temperature": 1.1, "seed": 5}, {"logit_bias": {"65": 100}}):
            found, truth = chat(other, **options), chat(client, **options)
            assert found.choices[0].message.content == truth.choices[0].message.content
        assert found.usage.completion_tokens_details.accepted_prediction_tokens > 3


def test_errors_keep_internals_inside():
    found = api_error(ValueError("/secret/path"))
    assert found.status == 500 and "secret" not in found.message
