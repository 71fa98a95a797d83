"""The chat page in a real browser: it streams, stops, shows errors, and fits narrow screens."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("tokenizers", reason="the tokenizers package is not installed")
pytest.importorskip("starlette", reason="the starlette package is not installed")
pytest.importorskip("uvicorn", reason="the uvicorn package is not installed")
sys.path.append(str(Path(__file__).parent.parent / "report"))
from browser import CHROMIUM, Browser
from running_server import running

from bitwright.llm.generation.generate import generate

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
IDLE = """new Promise((done) => { const look = () => running ? setTimeout(look, 20) : done(true);
    setTimeout(look, 20); })"""
CARDS = "[...document.querySelectorAll('.message')].map((c) => [c.className, c.textContent])"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture(scope="module")
def served(lm_wide):
    with running({"tiny": lm_wide}) as found:
        yield found


@pytest.fixture
def page(browser, served):
    found = browser.open(f"{served[1]}/")
    found.evaluate("$('temperature').value = 0; $('most').value = 12")
    yield found
    assert {url.partition("/v1")[0].rstrip("/") for url in found.requests} <= {served[1], "data:"}


def say(page, text):
    page.write("#input", text)
    page.press("Enter")
    assert page.evaluate(IDLE)


def test_a_conversation(page, lm_wide):
    hostile = "<img src=x onerror=alert(1)> <|im_end|>"
    talk = [{"role": "user", "content": hostile}]
    say(page, hostile)
    first = generate(lm_wide, talk, max_tokens=12).text
    cards = page.evaluate(CARDS)
    assert cards == [["message user", hostile], ["message assistant", first or "(no text)"]]
    assert page.evaluate("document.querySelectorAll('main img').length") == 0
    facts = page.evaluate("document.querySelector('.facts').textContent")
    assert facts.startswith("12 tokens in ") and "prompt tokens reused" in facts
    page.write("#input", "more")
    page.click("#send")
    assert page.evaluate(IDLE)
    talk += [{"role": "assistant", "content": first}, {"role": "user", "content": "more"}]
    assert page.evaluate(CARDS)[3][1] == generate(lm_wide, talk, max_tokens=12).text
    page.click("#clear")
    assert page.evaluate(CARDS) == [] and page.errors == []


def test_an_answer_is_stopped(page, served):
    page.evaluate("$('most').value = 110")
    with served[0].generations["tiny"].lm.engine.lock:  # no token comes
        page.write("#input", "hello")
        page.press("Enter")
        assert page.evaluate("$('send').textContent") == "Stop"
        page.click("#send")
    assert page.evaluate(IDLE) and page.evaluate("$('send').textContent") == "Send"
    say(page, "hello")
    assert len(page.evaluate(CARDS)) == 4


def test_errors_are_shown_and_the_message_stays(page):
    page.evaluate("$('temperature').value = -1")
    say(page, "hello")
    card = page.evaluate(CARDS)[-1]
    assert card[0] == "message assistant error" and "temperature is out of range" in card[1]
    assert page.evaluate("$('input').value") == "hello" and page.evaluate("messages.length") == 0


def test_the_key_is_asked_for(browser, lm):
    with running({"tiny": lm}, api_key="secret", default_tokens=3) as (_, address):
        page = browser.open(f"{address}/")
        assert page.evaluate("""new Promise((done) => { const look = () =>
            document.querySelector('.error') ? done(true) : setTimeout(look, 20); look(); })""")
        assert page.evaluate("document.activeElement.id") == "key"
        page.call("Input.insertText", text="secret")
        page.evaluate("$('most').value = 3")
        say(page, "hello")
        assert page.evaluate(CARDS)[-1][0] == "message assistant"


@pytest.mark.parametrize("width", [320, 768, 1600])
def test_the_page_is_not_wider_than_the_screen(page, served, width):
    page.resize(width, 700, is_phone=width < 500)
    page.goto(f"{served[1]}/")
    page.click("#show")
    say(page, "w" * 300)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.documentElement.scrollHeight") <= 700
