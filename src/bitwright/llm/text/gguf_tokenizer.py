"""Tokenizers from the metadata of a GGUF file (`tokenizer.ggml.*`).

`gpt2` is byte-level pair merging, `llama` sentencepiece pair merging by score with single bytes
as the last resort, `bert` word pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bitwright.errors import ImportModelError, UnsupportedError
from bitwright.llm.text.library import need
from bitwright.llm.text.splits import known_splits, split_of
from bitwright.llm.text.tokenizer import SpecialTokens, Tokenizer
from bitwright.llm.text.vocabulary import Spelling, Vocabulary

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
MAX_MERGED = 4096
"""Characters of a token that merges make: all its cuts are tried."""
_PREFIX = "tokenizer.ggml."
_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>")
"""Names of tokens that end a turn in every vocabulary that has them."""


class _Facts:
    """Typed access to the metadata, with errors that name the key."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self.tokens = self.strings("tokens")
        kinds = self._list("token_type", int) or [NORMAL] * len(self.tokens)
        if len(kinds) != len(self.tokens):
            raise ImportModelError(
                "the file gives another number of token types than of tokens",
                where=f"{_PREFIX}token_type",
                expected=len(self.tokens),
                found=len(kinds),
            )
        self.kinds = kinds

    def value(self, name: str, type_: type, default: Any) -> Any:
        found = self._metadata.get(_PREFIX + name, default)
        if isinstance(found, type_) or found is default:
            return found
        raise ImportModelError(
            "the value has another type",
            where=_PREFIX + name,
            expected=type_.__name__,
            found=type(found).__name__,
        )

    def _list(self, name: str, type_: type) -> list[Any]:
        found = self._metadata.get(_PREFIX + name)
        if found is None:
            return []
        if hasattr(found, "tolist"):
            found = found.tolist()
        if not isinstance(found, Sequence) or not all(isinstance(one, type_) for one in found):
            raise ImportModelError(
                "the value has another type",
                where=_PREFIX + name,
                expected=f"a list of {type_.__name__}",
            )
        return list(found)

    def strings(self, name: str) -> list[str]:
        found: list[str] = self._list(name, str)
        if not found:
            raise ImportModelError(
                "the file has no such list, so it has no complete tokenizer",
                where=_PREFIX + name,
            )
        return found

    def scores(self) -> list[float]:
        found = self._list("scores", (int, float))  # type: ignore[arg-type]
        if len(found) != len(self.tokens):
            raise ImportModelError(
                "the file gives another number of scores than of tokens",
                where=f"{_PREFIX}scores",
                expected=len(self.tokens),
                found=len(found),
            )
        return found

    def token(self, name: str) -> int | None:
        """The number of a token with a role; one outside the vocabulary counts as none."""
        found: int | None = self.value(f"{name}_token_id", int, None)
        return found if found is not None and 0 <= found < len(self.tokens) else None

    def of_kind(self, *kinds: int) -> list[int]:
        return [token for token, kind in enumerate(self.kinds) if kind in kinds]


def tokenizer_of_metadata(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that the metadata of a GGUF file describes."""
    facts = _Facts(metadata)
    model = facts.value("model", str, "")
    makers = {"gpt2": _byte_level, "llama": _sentencepiece, "bert": _word_piece}
    if model not in makers:
        raise UnsupportedError(
            f"there is no tokenizer of kind {model!r}",
            where=f"{_PREFIX}model",
            expected=", ".join(makers),
            hint="A Hugging Face folder with a tokenizer.json has it in another form.",
        )
    return makers[model](facts)


def _special(facts: _Facts, adds_begin: bool) -> SpecialTokens:
    ends = {facts.token("eos"), facts.token("eot"), facts.token("eom")} - {None}
    names = {facts.tokens[token]: token for token in facts.of_kind(CONTROL)}
    ends |= {names[name] for name in _ENDS if name in names}
    begin = facts.token("bos")
    return SpecialTokens(
        begin if begin is not None else facts.token("cls"),
        frozenset(token for token in ends if token is not None),
        facts.value("add_bos_token", bool, adds_begin),
        facts.token("seperator") or facts.token("separator") or facts.token("eos"),
        facts.token("eos") if facts.value("add_eos_token", bool, False) else None,
    )


def _vocabulary(facts: _Facts, spelling: Spelling) -> Vocabulary:
    tokens = facts.tokens
    return Vocabulary(
        len(tokens),
        lambda token: tokens[token],
        spelling,
        facts.of_kind(CONTROL, UNKNOWN),
        facts.of_kind(USER_DEFINED),
    )


def _add_names(tokenizer: Any, facts: _Facts, plain: bool) -> None:
    """Tokens that are cut out of a text before everything else.

    User-defined ones always are, control tokens only where names of tokens count.
    """
    added = need("tokenizers").AddedToken
    names = [
        added(facts.tokens[token], normalized=False, special=facts.kinds[token] == CONTROL)
        for token in facts.of_kind(*((USER_DEFINED,) if plain else (USER_DEFINED, CONTROL)))
        if facts.tokens[token]
    ]
    if names:
        tokenizer.add_tokens(names)


def _merges(facts: _Facts) -> list[tuple[str, str]]:
    found = []
    for line in facts.strings("merges"):
        left, space, right = line.partition(" ")
        if not (left and space and right):
            raise ImportModelError(f"a merge is not two parts: {line!r}", where=f"{_PREFIX}merges")
        found.append((left, right))
    return found


def _ids(facts: _Facts) -> dict[str, int]:
    """Numbers by text; of two tokens with one text the first counts."""
    return {text: token for token, text in reversed(list(enumerate(facts.tokens)))}


def _checked_model(make: Any, **options: Any) -> Any:
    try:
        return make(**options)
    except Exception as error:  # the library raises bare exceptions
        raise ImportModelError(
            f"the tokenizer's data do not fit together: {error}", where=_PREFIX.rstrip(".")
        ) from None


def _byte_level(facts: _Facts) -> Tokenizer:
    library = need("tokenizers")
    kind = facts.value("pre", str, "default")
    split = split_of(kind)
    if split is None:
        raise UnsupportedError(
            f"the tokenizer cuts words in an unknown way, {kind!r}",
            where=f"{_PREFIX}pre",
            expected=", ".join(known_splits()),
        )
    ids, merges = _ids(facts), _merges(facts)

    def make(plain: bool) -> Any:
        model = _checked_model(
            library.models.BPE, vocab=ids, merges=merges, ignore_merges=split.takes_whole_words
        )
        tokenizer = library.Tokenizer(model)
        pieces = library.pre_tokenizers
        tokenizer.pre_tokenizer = pieces.Sequence(
            [
                *(pieces.Split(library.Regex(one), "isolated") for one in split.expressions),
                pieces.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        _add_names(tokenizer, facts, plain)
        return tokenizer

    special = _special(facts, split.adds_begin)
    return Tokenizer(make, _vocabulary(facts, Spelling.BYTES), special, strips_space=False)


def _sentencepiece(facts: _Facts) -> Tokenizer:
    library = need("tokenizers")
    prefix = facts.value("add_space_prefix", bool, True)
    ids, scores = _ids(facts), facts.scores()
    merges = _merges_of_scores(facts, ids, scores)
    unknown = facts.token("unknown")
    unknown_text = None if unknown is None else facts.tokens[unknown]

    def make(plain: bool) -> Any:
        model = _checked_model(
            library.models.BPE,
            vocab=ids,
            merges=merges,
            unk_token=unknown_text,
            fuse_unk=True,
            byte_fallback=True,
        )
        tokenizer = library.Tokenizer(model)
        norm = library.normalizers
        steps = [norm.Prepend("▁")] if prefix else []
        tokenizer.normalizer = norm.Sequence([*steps, norm.Replace(" ", "▁")])
        _add_names(tokenizer, facts, plain)
        return tokenizer

    vocabulary = _vocabulary(facts, Spelling.SPACES)
    return Tokenizer(make, vocabulary, _special(facts, True), strips_space=prefix)


def _merges_of_scores(
    facts: _Facts, ids: Mapping[str, int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Every way to make a token of two others, the best scores first.

    Control tokens never come out of a merge.
    """
    no_parts = {facts.tokens[token] for token in facts.of_kind(CONTROL, UNKNOWN, BYTE)}
    found = []
    for token, text in enumerate(facts.tokens):
        if text in no_parts or ids[text] != token:
            continue
        if len(text) > MAX_MERGED:
            raise ImportModelError(
                f"token {token} is too long",
                where=f"{_PREFIX}tokens",
                expected=f"at most {MAX_MERGED} characters",
                found=len(text),
            )
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in ids and right in ids and not (left in no_parts or right in no_parts):
                found.append((-scores[token], token, left, right))
    found.sort(key=lambda one: one[:2])
    return [(left, right) for _, _, left, right in found]


def _word_piece(facts: _Facts) -> Tokenizer:
    library = need("tokenizers")
    normal = set(facts.of_kind(NORMAL))
    texts = [_word(text) if token in normal else text for token, text in enumerate(facts.tokens)]
    ids = {text: token for token, text in reversed(list(enumerate(texts)))}
    unknown = facts.token("unknown")
    unknown_text = "[UNK]" if unknown is None else texts[unknown]

    def make(plain: bool) -> Any:
        model = _checked_model(library.models.WordPiece, vocab=ids, unk_token=unknown_text)
        tokenizer = library.Tokenizer(model)
        tokenizer.normalizer = library.normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
        _add_names(tokenizer, facts, plain)
        return tokenizer

    vocabulary = Vocabulary(
        len(texts),
        lambda token: texts[token],
        Spelling.WORDS,
        facts.of_kind(CONTROL, UNKNOWN),
        facts.of_kind(USER_DEFINED),
    )
    return Tokenizer(make, vocabulary, _special(facts, True), strips_space=True)


def _word(text: str) -> str:
    """GGUF marks what begins a word (`▁the`), the library what continues one (`##ing`)."""
    return text[1:] if text.startswith("▁") else f"##{text}"
