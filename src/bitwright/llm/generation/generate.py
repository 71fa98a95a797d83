"""`bw.generate`: text from a model, for one prompt or many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

from bitwright.llm.generation.options import Options
from bitwright.llm.generation.results import Generation, Stream
from bitwright.llm.language_model import LanguageModel, Prompt

_MAX_SLOTS = 8


@overload
def generate(
    model: LanguageModel | str | Path,
    prompt: str | Sequence[int] | Sequence[Mapping[str, Any]],
    *,
    stream: Literal[False] = False,
    draft: Any = None,
    **options: Any,
) -> Generation: ...
@overload
def generate(
    model: LanguageModel | str | Path,
    prompt: str | Sequence[int] | Sequence[Mapping[str, Any]],
    *,
    stream: Literal[True],
    draft: Any = None,
    **options: Any,
) -> Stream: ...
@overload
def generate(
    model: LanguageModel | str | Path,
    prompt: Sequence[str] | Sequence[Sequence[int]] | Sequence[Sequence[Mapping[str, Any]]],
    *,
    stream: Literal[False] = False,
    draft: Any = None,
    **options: Any,
) -> list[Generation]: ...
def generate(
    model: LanguageModel | str | Path,
    prompt: Any,
    *,
    stream: bool = False,
    draft: Any = None,
    **options: Any,
) -> Generation | Stream | list[Generation]:
    """Text that continues a prompt.

    A prompt is a text, a list of messages (`{"role": "user", "content": ...}`) or a list of
    tokens; a list of prompts runs them together and returns a list. `stream=True` returns an
    iterator of pieces. `draft` speeds up without changing the result: "prompt" guesses from the
    text so far, a smaller LanguageModel (or its path) guesses by itself.

    The other options are those of `Options`: max_tokens, temperature (0, greedy), top_k, top_p,
    min_p, repetition_penalty, seed, stop, logprobs, json_schema, regex, ...
    """
    chosen = Options(**options)
    prompts = list(prompt) if _is_batch(prompt) else [prompt]
    if not isinstance(model, LanguageModel):
        model = LanguageModel(model, slots=max(1, min(len(prompts), _MAX_SLOTS)))
    if isinstance(draft, Path) or (isinstance(draft, str) and draft != "prompt"):
        draft = LanguageModel(draft, context=model.context)
    if not _is_batch(prompt):
        started = model.start(prompt, chosen, draft=draft)
        return started if stream else started.whole()
    streams = [model.start(one, chosen, draft=draft) for one in prompts]
    if stream:
        from bitwright.errors import RunError

        raise RunError("one prompt is streamed at a time", where="stream")
    return [one.whole() for one in streams]


def _is_batch(prompt: Prompt | Any) -> bool:
    """Whether it is a list of prompts."""
    if isinstance(prompt, str | bytes) or not isinstance(prompt, list | tuple) or not prompt:
        return False
    first = prompt[0]
    return isinstance(first, str | list | tuple)
