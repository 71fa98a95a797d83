"""The commands generate, chat and serve, over a small model written as a file."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

pytest.importorskip("tokenizers", reason="the tokenizers package is not installed")
pytest.importorskip("uvicorn", reason="the uvicorn package is not installed")
pytest.importorskip("httpx", reason="the httpx package is not installed")
import httpx
from click.testing import CliRunner

import bitwright.cli.language.generate as commands
from bitwright import demo
from bitwright.cli import main
from bitwright.llm.generation.generate import generate
from bitwright.llm.serve.models import name_and_path, open_models


@pytest.fixture
def call(lm, monkeypatch):
    """Runs a command whose model is the tiny one."""
    monkeypatch.setattr(commands.bitwright, "LanguageModel", lambda *_, **__: lm)

    def run(*arguments, stdin=None):
        return CliRunner().invoke(main, arguments, input=stdin)

    return run


def test_generate(call, lm, tmp_path):
    truth = generate(lm, "The statement", max_tokens=9)
    found = call("generate", "tiny", "The statement", "--max-tokens", "9")
    assert found.exit_code == 0 and found.stdout == truth.text + "\n"
    facts = json.loads(
        call("generate", "tiny", "--max-tokens", "9", "--json", stdin="The statement").stdout
    )
    assert facts["text"] == truth.text and facts["tokens"]["generated"] == 9
    pytest.importorskip("llguidance", reason="the llguidance package is not installed")
    (tmp_path / "schema.json").write_text('{"enum": ["yes", "no"]}')
    found = call("generate", "tiny", "x", "--json-schema", str(tmp_path / "schema.json"))
    assert found.stdout.strip() in ('"yes"', '"no"')
    assert call("generate", "tiny", "x", "--regex", "ab+c", "--draft", "prompt").exit_code == 0


@pytest.mark.parametrize(
    "options, message",
    [
        (["--temperature", "-1"], "temperature is out of range"),
        (["--regex", "("], "the regex cannot be used"),
        (["--json-schema", "missing.json"], "missing.json"),
    ],
)
def test_generate_with_wrong_options(call, options, message):
    found = call("generate", "tiny", "x", *options)
    assert found.exit_code == 2 and message in found.output


def test_chat(call, lm):
    talk = [{"role": "system", "content": "s"}, {"role": "user", "content": "hello"}]
    first = generate(lm, talk, max_tokens=5).text
    talk += [{"role": "assistant", "content": first}, {"role": "user", "content": "more"}]
    second = generate(lm, talk, max_tokens=5).text
    found = call("chat", "tiny", "--system", "s", "--max-tokens", "5", stdin="hello\nmore\n\n")
    assert found.exit_code == 0 and found.stdout == f"{first}\n{second}\n"


def test_serve_until_a_signal():
    command = [sys.executable, "-m", "bitwright", "serve", f"digits={demo.model_path()}"]
    server = subprocess.Popen(
        [*command, "--port", "0", "--threads", "1"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"BITWRIGHT_API_KEY": "secret"},
    )
    try:
        line = server.stdout.readline()
        address = re.fullmatch(r"serving digits at (http://127\.0\.0\.1:\d+)\n", line)[1]
        while True:
            try:
                assert httpx.get(f"{address}/health").json() == {"status": "ok"}
                break
            except httpx.TransportError:  # the socket is bound, and listens soon
                assert server.poll() is None
        assert httpx.get(f"{address}/v1/infer").status_code == 401
        key = {"authorization": "Bearer secret"}
        assert "inputs" in httpx.get(f"{address}/v1/infer", headers=key).json()
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


def test_serve_with_wrong_arguments(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    for arguments, message in (
        (["missing.gguf"], "there is no file or folder missing.gguf"),
        ([str(tmp_path / "a.gguf")], "a.gguf"),
        (["=x"], "is not NAME=MODEL"),
        ([f"a={demo.model_path()}", f"a={demo.model_path()}"], "two models are named 'a'"),
    ):
        found = CliRunner().invoke(main, ["serve", *arguments, "--port", "0"])
        assert found.exit_code == 2 and message in found.output
    assert name_and_path("name=folder/x.gguf") == ("name", "folder/x.gguf")
    assert list(open_models([str(demo.model_path())], threads=1)) == ["digits"]
