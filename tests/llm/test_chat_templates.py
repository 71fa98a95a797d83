"""Chat templates: what real ones need, and what hostile ones try."""

import pytest

pytest.importorskip("jinja2", reason="the jinja2 package is not installed")
from bitwright.errors import RunError
from bitwright.llm.text import chat_template
from bitwright.llm.text.chat_template import ChatTemplate, TemplateError, check_messages

TALK = [{"role": "system", "content": " be kind "}, {"role": "user", "content": "hi"}]


def test_what_templates_use():
    text = """
{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] | trim %}
{%- set messages = messages[1:] %}{% else %}{% set system = none %}{% endif -%}
{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles alternate') }}{% endif %}
{%- if m.content is string and 'x' not in m.content %}
{{- '[' ~ m['role'] ~ '] ' + m['content'].strip().split('</think>')[-1] }}{% else %}{% continue %}
{% endif %}{% endfor %}{% set ns = namespace(n=0) %}
{%- for i in range(3) %}{% set ns.n = ns.n + i %}
{%- endfor %}{{ ns.n }}{{ {'a': [1, 'é']} | tojson }}{{ [1, 2] | join('-') }}{{ system }}
{%- if add_generation_prompt %}>{% endif %}{{ undefined_name }}"""
    found = ChatTemplate(text).render(TALK, bos_token="<s>")
    assert found == '<s>[user] hi3{"a": [1, "é"]}1-2be kind>'
    with pytest.raises(TemplateError, match="it refuses these messages: roles alternate"):
        ChatTemplate(text).render([{"role": "assistant", "content": "a"}])


HOSTILE = {
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": "not end",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "without an end",
    "{{ ''.__class__.__mro__ }}": "SecurityError",
    "{{ cycler.__init__.__globals__.os.system('id') }}": "SecurityError",
    "{{ self.__init__.__globals__ }}": "SecurityError",
    "{{ messages.append(1) }}": "SecurityError",
    "{{ 'a'.ljust(1000000000) }}": "SecurityError",
    "{{ 'a' * 1000000000 }}": "too long",
    "{{ [1] * 1000000000 }}": "too long",
    "{{ 10 ** 10 ** 10 }}": "too long",
    "{% set n = namespace(x=9) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}":
        "too long",
    "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}":
        "too long",
    "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}":
        "too long",
    "{% set n = namespace(x='aa') %}{% for i in range(99) %}{% set n.x = n.x|replace('a', n.x) %}"
    "{% endfor %}": "too long",
    "{% set n = namespace(x='aa') %}{% for i in range(99) %}{% set n.x = n.x.replace('a', n.x) %}"
    "{% endfor %}": "too long",
    "{% set n = namespace(x='aa') %}{% for i in range(99) %}{% set n.x = n.x.join(n.x|list) %}"
    "{% endfor %}": "too long",
    "{% set n = namespace(x=['a']) %}{% for i in range(16) %}{% set n.x = [n.x, n.x, n.x, n.x] %}"
    "{% endfor %}{{ n.x }}": "too long|not end",
    "{{ (1).to_bytes(3000000000, 'big') }}": "fails: SecurityError|unsafe|undefined",
    "{{ 'a'.encode().ljust(3000000000) }}": "fails: SecurityError|unsafe|undefined",
    "{{ ('a' * 100000)|list|map('list')|sum(start=[]) }}": "sums what is not a number",
    "{{ '{:>1000000000}'.format(1) }}": "str.format",
    "{{ '%1000000000d' % 1 }}": "formats with %",
    "{{ 'x'|center(1000000000) }}": "cannot be read",
    "{% include '/etc/passwd' %}": "fails",
    "{% for x in": "cannot be read",
    "{{ nothing.x }}": "UndefinedError",
    "{{ raise_exception('no') }}": "refuses these messages: no",
    "{{ 1 / 0 }}": "ZeroDivisionError",
    "(" * 10 + "{{" + "(" * 5000 + "}}": "cannot be read",
}  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:40])
def test_hostile_templates_are_errors(text, monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_STEPS", 2_000)
    monkeypatch.setattr(chat_template, "MAX_CHARACTERS", 200_000)
    with pytest.raises(TemplateError, match=HOSTILE[text]):
        ChatTemplate(text).render(TALK)


def test_messages():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert check_messages([{"role": "user", "content": parts}])[0]["content"] == "ab"
    assert check_messages([{"role": "assistant", "content": None}])[0]["content"] == ""


@pytest.mark.parametrize(
    "messages, message",
    [
        ([], "at least one message"),
        ("hi", "at least one message"),
        (["hi"], r"messages\[0\]: a message is an object with a role"),
        ([{"role": 3}], "an object with a role"),
        ([{"role": "user", "content": 3}], r"messages\[0\]: the content is a text; found int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "only parts of type 'text'"),
    ],
)
def test_messages_that_are_wrong(messages, message):
    with pytest.raises(RunError, match=message):
        check_messages(messages)


def test_filters_that_compute_with_numbers():
    text = "{{ 1.25|round(1, 'ceil') }} {{ 1.5|round }} {{ [1, 2]|sum }} {{ [{'n': 3}]|sum('n') }}"
    assert ChatTemplate(text).render(TALK) == "1.3 2.0 3 3"
    assert ChatTemplate("{{ 1.5|round(999999999, 'ceil') }}").render(TALK) == "1.5"


def test_filters_of_blocks():
    text = "{% filter upper|trim %} a {% endfilter %}{% set x|lower|trim %} B {% endset %}{{ x }}"
    assert ChatTemplate(text).render(TALK) == "Ab"


def test_filters_without_a_loop_end_in_time(monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.0)
    with pytest.raises(TemplateError, match="does not end"):
        ChatTemplate("{% set x = 'ab'|upper %}").render(TALK)
