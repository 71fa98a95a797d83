"""Requests of OpenAI's interface as prompts and options."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from bitwright.llm.generation.options import Options
from bitwright.llm.serve.fields import Fields
from bitwright.llm.serve.settings import ApiError, Settings

IGNORED = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("parallel_tool_calls", "reasoning_effort", "verbosity", "model"),
)


@dataclass(frozen=True)
class GenerationRequest:
    """One request: prompts in the form of the interface, and what to do with each."""

    prompts: tuple[Any, ...]
    options: Options
    choices: int
    """Answers per prompt."""
    is_stream: bool
    has_usage: bool
    """Whether the stream ends with the counts of tokens."""

    def options_of(self, choice: int) -> Options:
        """Options of one of the answers: the next seed for the next answer."""
        return replace(self.options, seed=self.options.seed + choice)


def chat_request(body: Mapping[str, Any], settings: Settings) -> GenerationRequest:
    """A body of /v1/chat/completions."""
    fields = Fields(body, IGNORED)
    messages = fields.take("messages", list)
    fields.refuse("tools", [])
    fields.refuse("tool_choice", "none", "auto")
    fields.refuse("functions", [])
    fields.refuse("function_call", "none")
    fields.refuse("audio")
    fields.refuse("modalities", ["text"])
    fields.refuse("prediction")
    fields.refuse("web_search_options")
    wants = fields.take("logprobs", bool, False)
    top = fields.take("top_logprobs", int, None)
    if top is not None and not wants:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    limit = fields.take("max_completion_tokens", int, None)
    older = fields.take("max_tokens", int, None)
    limit = older if limit is None else limit
    return _request(fields, (messages,), limit, (top or 0) if wants else None, settings)


def completion_request(body: Mapping[str, Any], settings: Settings) -> GenerationRequest:
    """A body of /v1/completions."""
    fields = Fields(body, IGNORED)
    prompt = fields.take("prompt", (str, list))
    fields.refuse("echo", False)
    fields.refuse("suffix", "")
    fields.refuse("best_of", 1, body.get("n"))
    logprobs = fields.take("logprobs", int, None)
    is_many = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)
    prompts = tuple(prompt) if is_many else (prompt,)
    if not all(_is_prompt(one) for one in prompts):
        raise ApiError(
            400, "the prompt is a text, a list of texts, tokens or lists of tokens", param="prompt"
        )
    limit = fields.take("max_tokens", int, None)
    return _request(fields, prompts, limit, logprobs, settings)


def _is_prompt(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return bool(prompt)
    return isinstance(prompt, list) and bool(prompt) and all(type(one) is int for one in prompt)


def _request(
    fields: Fields,
    prompts: tuple[Any, ...],
    limit: int | None,
    logprobs: int | None,
    settings: Settings,
) -> GenerationRequest:
    number = (int, float)
    seed = fields.take("seed", int, None)
    schema, regex = _constraint(fields)
    stop = fields.take("stop", (str, list), ())
    count = fields.take("n", int, 1)
    is_stream = fields.take("stream", bool, False)
    stream_options = fields.take("stream_options", dict, {})
    if limit is not None and limit > settings.max_tokens:
        raise ApiError(
            400,
            f"max_tokens is too large: this server allows {settings.max_tokens}, found {limit}",
            param="max_tokens",
        )
    if not 1 <= count * len(prompts) <= settings.max_choices:
        raise ApiError(
            400, f"prompts times n are 1 to {settings.max_choices} on this server", param="n"
        )
    options = Options(
        max_tokens=settings.default_tokens if limit is None else limit,
        temperature=fields.take("temperature", number, 1.0),
        top_p=fields.take("top_p", number, 1.0),
        top_k=fields.take("top_k", int, 0),
        min_p=fields.take("min_p", number, 0.0),
        repetition_penalty=fields.take("repetition_penalty", number, 1.0),
        presence_penalty=fields.take("presence_penalty", number, 0.0),
        frequency_penalty=fields.take("frequency_penalty", number, 0.0),
        logit_bias=_bias(fields.take("logit_bias", dict, {})),
        seed=secrets.randbits(62) if seed is None else seed,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        logprobs=logprobs,
        json_schema=schema,
        regex=regex,
        ignore_end=fields.take("ignore_eos", bool, False),
    )
    fields.finish()
    has_usage = bool(stream_options.get("include_usage"))
    return GenerationRequest(prompts, options, count, is_stream, has_usage)


def _bias(given: Mapping[str, Any]) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in given.items()}
    except ValueError:
        raise ApiError(400, "keys of logit_bias are tokens", param="logit_bias") from None


def _constraint(fields: Fields) -> tuple[Mapping[str, Any] | bool | None, str | None]:
    """The schema and the regular expression that the answer must fit."""
    regex = fields.take("regex", str, None)
    form = fields.take("response_format", dict, {"type": "text"})
    kind = form.get("type")
    if kind == "text":
        return None, regex
    if kind == "json_object":
        return True, regex
    if kind == "json_schema":
        named = form.get("json_schema")
        schema = named.get("schema") if isinstance(named, dict) else None
        if isinstance(schema, dict):
            return schema, regex
        raise ApiError(400, "response_format.json_schema has no schema", param="response_format")
    raise ApiError(
        400, "response_format is of type text, json_object or json_schema", param="response_format"
    )
