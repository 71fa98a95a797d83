"""The names that a server answers to."""

import pytest

pytest.importorskip("tokenizers", reason="the tokenizers package is not installed")
pytest.importorskip("starlette", reason="the starlette package is not installed")
pytest.importorskip("uvicorn", reason="the uvicorn package is not installed")
pytest.importorskip("httpx", reason="the httpx package is not installed")
import httpx
from click.testing import CliRunner
from running_server import running

from bitwright.cli import main
from bitwright.llm.serve import models, run
from bitwright.llm.serve.hosts import host_name, is_allowed


def asked_as(address, host):
    answer = httpx.get(f"{address}/v1/models", headers={"Host": host})
    return answer.status_code, answer.json().get("error", {}).get("code")


def test_names_that_nobody_allowed_are_refused(lm):
    with running({"tiny": lm}) as (_, address):
        for host in ("localhost:80", "a.localhost", "127.0.0.1", "[::1]:9", "192.168.0.7:8000"):
            assert asked_as(address, host) == (200, None)
        for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example"):
            assert asked_as(address, host) == (403, "host_not_allowed")
        assert httpx.get(f"{address}/", headers={"Host": "evil.example"}).status_code == 403
    with running({"tiny": lm}, hosts=("models.example",)) as (_, address):
        assert asked_as(address, "models.example:80") == (200, None)
        assert asked_as(address, "models.example.org") == (403, "host_not_allowed")
    with running({"tiny": lm}, api_key="secret") as (_, address):
        assert asked_as(address, "any.example") == (401, "invalid_api_key")


@pytest.mark.parametrize(
    ("header", "allowed", "expected"),
    [
        ("Models.Example.:80", ("models.example",), True),
        ("models.example", ("Models.Example.",), True),
        ("models.example:8000", ("models.example:8000",), True),
        ("a.inner.example", ("*.inner.example",), True),
        ("inner.example", ("*.inner.example",), False),
        ("xinner.example", ("*.inner.example",), False),
        ("localhost.evil", (), False),
        ("0x7f.1", (), False),
        ("anything", ("*",), True),
        ("", (), False),
    ],
)
def test_names_and_patterns(header, allowed, expected):
    assert is_allowed(host_name(header), allowed) is expected


@pytest.mark.parametrize(
    ("arguments", "hosts"),
    [
        ((), ("localhost",)),
        (("--allow-host", "a.example"), ("a.example", "localhost")),
        (("--api-key", "x"), ()),
    ],
)
def test_the_name_that_a_server_is_started_with(arguments, hosts, monkeypatch):
    settings = []
    monkeypatch.setattr(models, "open_models", lambda *paths, **options: {})
    monkeypatch.setattr(run, "serve", lambda opened, listening, given, *_: settings.append(given))
    options = ["serve", "m.gguf", "--host", "localhost", "--port", "0", *arguments]
    result = CliRunner().invoke(main, options, catch_exceptions=False)
    assert result.exit_code == 0
    assert settings[0].hosts == hosts
