"""Generation: reproducible, streamed, stopped, constrained, speculated."""

import collections
import json
import math
import re

import numpy as np
import pytest

pytest.importorskip("tokenizers", reason="the tokenizers package is not installed")
from bitwright.errors import RunError
from bitwright.llm.generation.generate import generate
from bitwright.llm.generation.options import Options
from bitwright.llm.generation.sampling import Sampler, largest, log_probabilities, uniform
from bitwright.llm.generation.speculation import PromptLookup
from bitwright.llm.generation.stops import StopFinder

PROMPT = "The statement with a prefix"
SAMPLED = {"temperature": 1.2, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "seed": 3}
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.1}
WAYS = {
    "greedy": {},
    "sampled": SAMPLED,
    "penalties": SAMPLED | PENALTIES,
    "bias": {"temperature": 1.0, "logit_bias": {65: 3.0, 66: -100.0}},
}


@pytest.mark.parametrize("way", WAYS)
def test_same_tokens_however_they_are_computed(lm, lm_wide, way):
    options = WAYS[way] | {"max_tokens": 24}
    lm.engine.forget()
    alone = generate(lm, PROMPT, **options)
    assert len(alone.tokens) == 24 and alone.counts.reused == 0
    again = generate(lm, PROMPT, **options)
    assert again.counts.reused == alone.counts.prompt - 1
    prompts = ["x", PROMPT, "another prompt", PROMPT, "y" * 40, "z", "w"]
    batch = generate(lm_wide, prompts, **options)
    looked_up = generate(lm, PROMPT, draft="prompt", **options)
    drafted = generate(lm, PROMPT, draft=lm_wide, **options)
    for other in (again, batch[1], batch[3], looked_up, drafted):
        assert other.tokens == alone.tokens and other.text == alone.text
    if way == "greedy":
        assert drafted.counts.accepted == drafted.counts.drafted > 10


def test_generations_of_a_session_by_hand(lm):
    found = generate(lm, PROMPT, max_tokens=12)
    with lm.session() as session:
        logits, tokens = session.run(lm.tokenize(PROMPT)), []
        for _ in range(12):
            tokens.append(int(np.argmax(logits)))
            logits = session.run(tokens[-1:])
    assert list(found.tokens) == tokens and found.text == lm.detokenize(tokens)


def test_prompt_lookup_helps_where_text_repeats(lm):
    repeating = {"max_tokens": 20, "logit_bias": {65: 100}}
    found = generate(lm, PROMPT, draft="prompt", **repeating)
    assert found.tokens == generate(lm, PROMPT, **repeating).tokens == (65,) * 20
    assert found.counts.accepted > 10
    lookup = PromptLookup()
    assert lookup.propose([1, 2, 3, 4, 5, 1, 2, 3], 3) == [4, 5, 1]
    assert lookup.propose([1, 2, 3, 4, 5, 1, 2, 3, 4], 2) == [5, 1]
    assert lookup.propose([9, 8], 2) == []


def test_streams(lm):
    whole = generate(lm, PROMPT, max_tokens=20, logprobs=3)
    pieces = list(generate(lm, PROMPT, max_tokens=20, logprobs=3, stream=True))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish_reason == "length" == whole.finish_reason
    with generate(lm, PROMPT, max_tokens=100, stream=True) as stream:
        next(stream)
    assert stream.job.is_done and stream.counts.generated < 5
    assert lm.scheduler.active == lm.scheduler.waiting == 0


def test_log_probabilities(lm):
    found = generate(lm, PROMPT, max_tokens=5, logprobs=4)
    with lm.session() as session:
        logits = session.run(lm.tokenize(PROMPT))
    truth = np.sort(log_probabilities(logits))[::-1]
    assert math.isclose(math.fsum(np.exp(truth)), 1, rel_tol=1e-9)
    first = found.logprobs[0]
    assert first.token == found.tokens[0] == first.top[0][0] and len(first.top) == 4
    assert [value for _, value in first.top] == pytest.approx(list(truth[:4]))
    assert len(generate(lm, PROMPT, max_tokens=5, logprobs=0).logprobs) == 5
    assert generate(lm, PROMPT, max_tokens=5).logprobs is None


def test_stop_strings_across_tokens(lm):
    text = generate(lm, PROMPT, max_tokens=40).text
    for start, length in ((3, 1), (7, 4), (11, 6), (20, 9)):
        stop = text[start : start + length]
        found = generate(lm, PROMPT, max_tokens=40, stop=[stop, "never there"])
        assert found.text == text[: text.index(stop)] and found.finish_reason == "stop"
        pieces = generate(lm, PROMPT, max_tokens=40, stop=stop, stream=True, draft="prompt")
        assert "".join(piece.text for piece in pieces) == found.text


def test_stop_finder():
    finder = StopFinder(["abc", "bd"])
    assert finder.add("xa") == ("x", False) and finder.add("b") == ("", False)
    assert finder.add("x") == ("abx", False) and finder.add("ab") == ("", False)
    assert finder.add("d..") == ("a", True)
    assert StopFinder(["ab"]).add("za") == ("z", False)
    finder.add("a")
    assert finder.finish() == "a" and finder.finish() == ""


def test_an_end_token_ends(lm):
    found = generate(lm, PROMPT, max_tokens=9, logit_bias={2: 100})
    assert found.tokens == () and found.text == "" and found.finish_reason == "stop"
    went_on = generate(lm, PROMPT, max_tokens=9, logit_bias={2: 100}, ignore_end=True)
    assert went_on.tokens == (2,) * 9 and went_on.finish_reason == "length"


def test_the_end_of_the_context(lm):
    found = generate(lm, [5] * 120, max_tokens=None, ignore_end=True)
    assert len(found.tokens) == 9 and found.finish_reason == "length"
    same = generate(lm, [5] * 120, max_tokens=None, ignore_end=True, draft="prompt")
    assert same.tokens == found.tokens
    with pytest.raises(RunError, match="prompt does not fit the context; expected at most 127"):
        generate(lm, [5] * 128)


def test_messages(lm):
    said = "bye <|im_end|>"
    tokens = lm.chat_prompt([{"role": "user", "content": said}])
    assert tokens.count(2) == 1
    assert lm.detokenize(tokens, special=True) == (
        f"<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n"
    )
    found = generate(lm, [{"role": "user", "content": said}], max_tokens=4)
    assert found.counts.prompt == len(tokens)
    batch = generate(lm, [[{"role": "user", "content": said}], "x"], max_tokens=4)
    assert batch[0].tokens == found.tokens


class TestConstraints:
    @pytest.fixture(autouse=True)
    def _package(self):
        pytest.importorskip("llguidance", reason="the llguidance package is not installed")

    @pytest.mark.parametrize("seed", range(4))
    def test_regular_expressions(self, lm, seed):
        pattern = r"(yes|no|maybe), [0-9]{2,4}(\.[0-9]+)? é[a-z]*!"
        found = generate(lm, PROMPT, regex=pattern, temperature=1.5, seed=seed, max_tokens=60)
        if found.finish_reason == "stop":
            assert re.fullmatch(pattern, found.text)
        drafted = generate(
            lm, PROMPT, regex=pattern, temperature=1.5, seed=seed, max_tokens=60, draft="prompt"
        )
        assert drafted.tokens == found.tokens

    @pytest.mark.parametrize("seed", range(4))
    def test_schemas(self, lm, seed):
        schema = {
            "type": "object",
            "properties": {
                "name": {"enum": ["Ada", "Bo"]},
                "age": {"type": "integer", "minimum": 0, "maximum": 99},
                "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
            },
            "required": ["name", "age", "tags"],
            "additionalProperties": False,
        }
        found = generate(lm, PROMPT, json_schema=schema, temperature=2.0, seed=seed, max_tokens=90)
        value = json.loads(found.text)
        assert found.finish_reason == "stop" and value["name"] in ("Ada", "Bo")
        assert 0 <= value["age"] <= 99 and all(isinstance(tag, bool) for tag in value["tags"])

    def test_any_object(self, lm):
        found = generate(lm, PROMPT, json_schema=True, max_tokens=20)
        assert found.text.startswith("{")

    @pytest.mark.parametrize(
        "options, message",
        [
            ({"regex": "(a"}, "the regex cannot be used"),
            ({"json_schema": {"type": "nothing"}}, "the json_schema cannot be used"),
            ({"json_schema": {"a": {1, 2}}}, "schema is not valid"),
            ({"regex": "a", "json_schema": {}}, "json_schema or regex, not both"),
            ({"json_schema": [1]}, "the schema is an object"),
            ({"regex": "a{9}" * 100_000}, "the regex is too long"),
        ],
    )
    def test_constraints_that_are_wrong(self, lm, options, message):
        with pytest.raises(RunError, match=message):
            generate(lm, PROMPT, **options)
        assert lm.scheduler.active == 0


@pytest.mark.parametrize(
    "options, message",
    [
        ({"temperature": -1}, "temperature is out of range; expected a number from 0 to 100"),
        ({"temperature": math.nan}, "temperature is out of range"),
        ({"top_p": 1.5}, "top_p is out of range"),
        ({"max_tokens": 0}, "max_tokens is out of range; expected an integer from 1"),
        ({"max_tokens": True}, "max_tokens is out of range"),
        ({"top_k": "5"}, "top_k is out of range"),
        ({"logprobs": 21}, "logprobs is out of range"),
        ({"stop": [""]}, "stop strings are texts that are not empty"),
        ({"stop": ["a"] * 17}, "too many stop strings"),
        ({"logit_bias": {600: 1}}, "token 600 is not in the vocabulary"),
        ({"logit_bias": [1]}, "the bias is an object"),
        ({"draft": 3}, 'draft is "prompt" or a LanguageModel'),
        ({"seed": 1.5}, "seed is out of range"),
    ],
)
def test_options_that_are_wrong(lm, options, message):
    with pytest.raises(RunError, match=message):
        generate(lm, PROMPT, **options)


@pytest.mark.parametrize("prompt", ["", [], [999], {"a": 1}, b"\xff", [{"role": 3}]])
def test_prompts_that_are_wrong(lm, prompt):
    with pytest.raises(RunError):
        generate(lm, prompt)


def test_a_run_that_fails_ends_its_jobs_only(lm, monkeypatch):
    def fails(*args):
        raise MemoryError("none left")

    lm.engine.forget()
    with monkeypatch.context() as patch:
        patch.setattr(lm.engine.decoder, "run", fails)
        with pytest.raises(RunError, match="the generation failed: MemoryError"):
            generate(lm, PROMPT)
    assert generate(lm, PROMPT, max_tokens=3).counts.reused == 0


def test_draws_follow_the_probabilities():
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    count = 4_000

    def shares(**options):
        sampler = Sampler(Options(temperature=1.0, **options), [], 4)
        found = collections.Counter(sampler.choose(logits, at) for at in range(count))
        return [found[token] / count for token in range(4)]

    assert shares() == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.03)
    assert shares(top_k=2) == pytest.approx([0.625, 0.375, 0, 0], abs=0.03)
    assert shares(top_p=0.79) == pytest.approx([0.625, 0.375, 0, 0], abs=0.03)
    assert shares(min_p=0.2) == pytest.approx([0.526, 0.316, 0.158, 0], abs=0.03)
    assert shares(top_p=0.0) == [1, 0, 0, 0]
    assert len({uniform(1, at) for at in range(1000)}) == 1000


@pytest.mark.parametrize("size", [1, 5, 9_000])
@pytest.mark.parametrize("limits", [{"top_p": 0.9}, {"min_p": 0.02}, {"top_p": 0.999}])
def test_limits_over_large_vocabularies(size, limits):
    """The same tokens as a plain sort over everything."""
    draw = np.random.default_rng(size)
    logits = draw.normal(0, 1.5, size).astype(np.float32)
    sampler = Sampler(Options(temperature=0.9, **limits), [], size)
    found = {sampler.choose(logits, at) for at in range(50)}
    weights = np.exp((logits.astype(np.float64) - logits.max()) / 0.9)
    order = np.argsort(-weights, kind="stable")
    if "top_p" in limits:
        before = np.cumsum(weights[order]) - weights[order]
        allowed = order[before < limits["top_p"] * weights.sum()]
    else:
        allowed = order[weights[order] >= limits["min_p"]]
    assert found <= set(allowed.tolist())


def test_logits_that_are_not_finite():
    with pytest.raises(RunError, match="not finite"):
        Sampler(Options(), [], 3).choose(np.full(3, np.nan, np.float32), 0)
    with pytest.raises(RunError, match="empty mask"):
        Sampler(Options(), [], 3).choose(np.zeros(3, np.float32), 0, np.zeros(3, bool))


@pytest.mark.parametrize("size", [1, 15, 97, 5000])
def test_the_largest_values_are_those_of_a_sort(size):
    rng = np.random.default_rng(size)
    for values in (rng.standard_normal(size), rng.integers(0, 9, size), np.full(size, -np.inf)):
        logits = values.astype(np.float32)
        logits[rng.random(size) < 0.3] = -np.inf
        order = np.argsort(-logits, kind="stable")
        for count in {1, 2, 40, size // 2, size} - {0}:
            np.testing.assert_array_equal(largest(logits, count), order[:count])


def test_draws_among_many_tokens():
    logits = np.full(700, -np.inf, np.float32)
    logits[[3, 256, 699]] = np.log([0.5, 0.3, 0.2])
    sampler = Sampler(Options(temperature=1.0, seed=5), [], 700)
    found = [sampler.choose(logits, position) for position in range(3000)]
    for token, share in ((3, 0.5), (256, 0.3), (699, 0.2)):
        assert abs(found.count(token) / 3000 - share) < 0.04
    assert len(set(found)) == 3
