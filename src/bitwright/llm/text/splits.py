"""How a byte-level tokenizer of a GGUF file cuts text into words before it merges bytes.

The file names its kind in `tokenizer.ggml.pre`. A kind is a sequence of regular expressions; each
one cuts the pieces that the one before left, and what it does not match stays a piece.
"""

from __future__ import annotations

from dataclasses import dataclass

_SUFFIX = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"  # and what is left
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"


def _words(digits: str, suffix: str = _SUFFIX) -> str:
    """Words with one leading character, numbers of `digits`, punctuation with line ends."""
    return rf"{suffix}|{_BEFORE}\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _cased(suffix: str, digits: str) -> str:
    """Words that end where an upper-case letter follows a lower-case one."""
    return (
        rf"{_BEFORE}{_UPPER}*{_LOWER}+{suffix}|{_BEFORE}{_UPPER}+{_LOWER}*{suffix}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_LLAMA3 = (_words(r"\p{N}{1,3}"),)
_QWEN2 = (_words(r"\p{N}"),)
_DIGITS_GPT2 = (r"\p{N}", _GPT2)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)

_BY_SPLIT: dict[tuple[str, ...], str] = {
    (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"): "default",
    _LLAMA3: "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 dbrx smaug-bpe "
    "chatglm-bpe glm4",
    _QWEN2: "qwen2 deepseek-r1-qwen kormo megrez hunyuan stablelm2 grok-2 solar-open",
    (_GPT2,): "gpt-2 mpt olmo jais phi-2 roberta-bpe exaone4 mellum modern-bert gigachat trillion "
    "granite-docling jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code a.x-4.0",
    _DIGITS_GPT2: "smollm starcoder refact command-r codeshell exaone minerva-7b",
    (_cased("", r"\p{N}"),): "tekken",
    (_cased(f"{_SUFFIX}?", r"\p{N}{1,3}"),): "gpt-4o llama4 minimax-m2",
    _DEEPSEEK3: "deepseek-v3",
    (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"): "falcon",
    (_BLOOM,): "bloom poro-chat gpt3-finnish",
    (_BLOOM, r"\p{N}"): "viking",
    (
        rf"{_SUFFIX}|{_BEFORE}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
        rf"|{_SPACES}",
    ): "qwen35",
}
_SPLITS = {name: split for split, names in _BY_SPLIT.items() for name in names.split()}
_LLAMA3_NAMES = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2")
_WHOLE_WORDS = _BEGIN = frozenset((*_LLAMA3_NAMES, "tekken"))


@dataclass(frozen=True)
class Split:
    """A kind of cutting, and the defaults that come with it."""

    expressions: tuple[str, ...]
    takes_whole_words: bool
    """A word that is a token is not cut, whatever the merges say."""
    adds_begin: bool
    """Prompts start with the begin token unless the file says otherwise."""


def split_of(kind: str) -> Split | None:
    """The cutting of a kind that GGUF files name; None if it is not known."""
    if kind not in _SPLITS:
        return None
    return Split(_SPLITS[kind], kind in _WHOLE_WORDS, kind in _BEGIN)


def known_splits() -> tuple[str, ...]:
    return tuple(sorted(_SPLITS))
