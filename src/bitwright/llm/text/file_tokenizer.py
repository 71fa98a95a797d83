"""Tokenizers from a Hugging Face tokenizer.json, with the roles of tokens from its neighbours."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bitwright.errors import ImportModelError
from bitwright.llm.text.library import need
from bitwright.llm.text.tokenizer import SpecialTokens, Tokenizer
from bitwright.llm.text.vocabulary import Spelling, Vocabulary


def tokenizer_of_file(path: Path | str) -> Tokenizer:
    """The tokenizer of a tokenizer.json.

    tokenizer_config.json and generation_config.json beside it name begin and end tokens.
    """
    path = Path(path)
    library = need("tokenizers")
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ImportModelError(f"the tokenizer cannot be read: {error}", where=str(path)) from None
    if not isinstance(data, dict):
        raise ImportModelError("the tokenizer is not a JSON object", where=str(path))

    def make(plain: bool) -> Any:
        try:
            tokenizer = library.Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare exceptions
            raise ImportModelError(
                f"the tokenizer cannot be read: {error}", where=str(path)
            ) from None
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = plain
        if getattr(tokenizer.model, "dropout", None):  # for training: it makes tokens random
            tokenizer.model.dropout = None
        return tokenizer

    first = make(True)
    made = {True: first}
    added = first.get_added_tokens_decoder()
    vocabulary = Vocabulary(
        max((*first.get_vocab().values(), *added), default=-1) + 1,
        first.id_to_token,
        _spelling(data),
        [token for token, one in added.items() if one.special],
        added,
    )
    special = _special(path.parent, first)
    return Tokenizer(
        lambda plain: made.get(plain) or make(plain),
        vocabulary,
        special,
        strips_space=_strips_space(data),
    )


def _steps(part: Any) -> list[dict[str, Any]]:
    """A stage of the tokenizer as a list of its steps."""
    if not isinstance(part, dict):
        return []
    for name in ("decoders", "normalizers", "pretokenizers"):
        if isinstance(part.get(name), list):
            return [one for inner in part[name] for one in _steps(inner)]
    return [part]


def _spelling(data: Mapping[str, Any]) -> Spelling:
    kinds = {one.get("type") for one in _steps(data.get("decoder"))}
    if "ByteLevel" in kinds:
        return Spelling.BYTES
    return Spelling.WORDS if "WordPiece" in kinds else Spelling.SPACES


def _strips_space(data: Mapping[str, Any]) -> bool:
    """Whether decoding removes the space that encoding put in front."""
    for one in _steps(data.get("decoder")):
        if one.get("type") in ("Strip", "WordPiece"):
            return True
        if one.get("type") == "Metaspace":
            return bool(one.get("prepend_scheme", "always") != "never")
    return False


def _json_beside(folder: Path, name: str) -> dict[str, Any]:
    try:
        found = json.loads((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _special(folder: Path, tokenizer: Any) -> SpecialTokens:
    config = _json_beside(folder, "tokenizer_config.json")
    generation = _json_beside(folder, "generation_config.json") or _json_beside(
        folder, "config.json"
    )

    def named(key: str) -> int | None:
        value = config.get(key)
        text = value.get("content") if isinstance(value, dict) else value
        found: int | None = tokenizer.token_to_id(text) if isinstance(text, str) else None
        return found

    def numbers(key: str) -> set[int]:
        value = generation.get(key)
        listed = value if isinstance(value, list) else [value]
        return {one for one in listed if type(one) is int}

    ends = numbers("eos_token_id") | ({named("eos_token")} - {None})
    begin = named("bos_token")
    if begin is None:
        begin = min(numbers("bos_token_id"), default=named("cls_token"))
    empty = tokenizer.encode("", add_special_tokens=True).ids
    adds = config.get("add_bos_token")
    adds_begin = adds if isinstance(adds, bool) else bool(empty) and empty[0] == begin
    template = empty[1:] if empty[:1] == [begin] else empty
    final = template[-1] if template else None
    if config.get("add_eos_token") is True:
        final = named("eos_token")
    return SpecialTokens(
        begin,
        frozenset(t for t in ends if t is not None),
        adds_begin,
        named("sep_token"),
        final,
    )


def chat_template_beside(path: Path | str) -> str | None:
    """The chat template that stands beside a tokenizer.json; None if there is none."""
    folder = Path(path).parent
    try:
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except (OSError, ValueError):
        pass
    found = _json_beside(folder, "tokenizer_config.json").get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default") or next(iter(named.values()), None)
    return found if isinstance(found, str) else None
