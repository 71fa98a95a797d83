"""Sessions and the engine: slots, prefixes, saved files, limits."""

import json
import threading

import numpy as np
import pytest

from bitwright.errors import BitwrightError, ImportModelError, RunError
from bitwright.llm.engine import engine as engine_module
from bitwright.llm.engine.decoder import Decoder
from bitwright.llm.engine.engine import Engine, Sequence, Work, common_prefix

TOKENS = [int(t) for t in np.random.default_rng(0).integers(0, 600, 40)]


@pytest.fixture
def truth(lm):
    """Logits behind every token of TOKENS."""
    with lm.session() as session:
        return session.run(TOKENS, all_logits=True)


def test_one_at_a_time_or_together(lm, truth, monkeypatch):
    with lm.session() as session:
        single = [session.run([token]) for token in TOKENS]
    np.testing.assert_array_equal(np.stack(single), truth)
    monkeypatch.setattr(engine_module, "CHUNK", 7)
    with lm.session() as session:
        np.testing.assert_array_equal(session.run(np.array(TOKENS), all_logits=True), truth)
        session.truncate(11)
        np.testing.assert_array_equal(session.run(TOKENS[11:]), truth[-1])
        assert session.tokens == TOKENS and len(session) == 40


def test_clones_and_more_sessions_than_slots(lm, truth):
    first = lm.session()
    first.run(TOKENS[:20])
    others = [first.clone() for _ in range(4)]
    for step in range(20, 40):
        for one in (first, *others):
            np.testing.assert_array_equal(one.run([TOKENS[step]]), truth[step])
    others[0].truncate(3)
    np.testing.assert_array_equal(others[0].run(TOKENS[3:9]), truth[8])
    np.testing.assert_array_equal(first.clone().clone().run([5]), first.run([5]))
    for one in (first, *others):
        one.close()


def test_a_saved_session_goes_on(lm, lm_wide, truth, tmp_path):
    with lm.session() as session:
        session.run(TOKENS[:25])
        session.save(tmp_path / "s.session")
    with lm.load_session(tmp_path / "s.session") as again:
        assert again.tokens == TOKENS[:25]
        np.testing.assert_array_equal(again.run(TOKENS[25:30]), truth[29])
    with lm_wide.load_session(tmp_path / "s.session") as other:  # another context and threads
        np.testing.assert_array_equal(other.run(TOKENS[25:30]), truth[29])
    lm.session().save(tmp_path / "empty")
    assert lm.load_session(tmp_path / "empty").tokens == []


def test_files_that_are_no_session(lm, tmp_path):
    path = tmp_path / "s.session"
    with lm.session() as session:
        session.run(TOKENS[:5])
        session.save(path)
    good = path.read_bytes()
    for bad in (b"", b"PK", good[:100], good[: len(good) // 2], good[:-30], b"x" * 50):
        path.write_bytes(bad)
        with pytest.raises(ImportModelError):
            lm.load_session(path)
    with pytest.raises(ImportModelError, match="cannot be read"):
        lm.load_session(tmp_path / "missing")

    def changed(**facts):
        with np.load(tmp_path / "good", allow_pickle=False) as file:
            arrays = dict(file)
        known = json.loads(bytes(arrays["facts"])) | facts
        arrays["facts"] = np.frombuffer(json.dumps(known).encode(), np.uint8)
        with open(path, "wb") as file:
            np.savez(file, **arrays)
        return path

    (tmp_path / "good").write_bytes(good)
    with pytest.raises(ImportModelError, match="another model"):
        lm.load_session(changed(model="other"))
    with pytest.raises(ImportModelError, match="no saved session"):
        lm.load_session(changed(format="other"))


@pytest.mark.parametrize(
    "tokens, message",
    [
        ([], "at least one integer; found an empty list"),
        ([600], "token 600 is not in the vocabulary; expected 0 to 599"),
        ([1, -1], "token -1 is not in the vocabulary"),
        ([1.5], "tokens are a list of at least one integer"),
        ("text", "tokens are a list"),
        ([[1]], "tokens are a list"),
        ([1] * 129, "do not fit the context; expected at most 128 positions, found 0 in the cache"),
    ],
)
def test_tokens_that_are_wrong(lm, tokens, message):
    with lm.session() as session, pytest.raises(RunError, match=message):
        session.run(tokens)
    assert len(session) == 0


def test_a_full_context_is_an_error_and_changes_nothing(lm):
    with lm.session() as session:
        session.run([1] * 127)
        session.run([2])
        with pytest.raises(RunError, match="found 128 in the cache and 1 more"):
            session.run([3])
        session.truncate(127)
        session.run([2])
        with pytest.raises(RunError, match="expected 0 to 128, found 200"):
            session.truncate(200)


def test_a_run_that_fails_leaves_the_session_as_it_was(lm, truth, monkeypatch):
    with lm.session() as session:
        session.run(TOKENS[:5])
        monkeypatch.setattr(engine_module, "CHUNK", 4)
        run, calls = lm.engine.decoder.run, []

        def fails(*args):
            calls.append(args)
            if len(calls) == 2:
                raise MemoryError
            return run(*args)

        monkeypatch.setattr(lm.engine.decoder, "run", fails)
        with pytest.raises(MemoryError):
            session.run(TOKENS[5:20])
        assert len(session) == 5
        np.testing.assert_array_equal(session.run(TOKENS[5:8]), truth[7])


def test_ragged_batches(lm_wide, truth):
    """Sequences of any lengths in one run give what each gives alone."""
    engine = lm_wide.engine
    sequences = [Sequence() for _ in range(5)]
    ends = [0] * 5
    draw = np.random.default_rng(3)
    while min(ends) < 40:
        chosen = [i for i in draw.permutation(5)[: draw.integers(1, 6)] if ends[i] < 40]
        works = []
        for i in chosen:
            count = int(draw.integers(1, min(9, 41 - ends[i])))
            wanted = int(draw.integers(0, count + 1))
            works.append(Work(sequences[i], TOKENS[ends[i] : ends[i] + count], wanted))
        if not works:
            continue
        for i, work, logits in zip(chosen, works, engine.run(works), strict=True):
            ends[i] += len(work.tokens)
            np.testing.assert_array_equal(logits, truth[ends[i] - work.wanted : ends[i]])
    with pytest.raises(RunError, match="more sequences than the cache has slots"):
        engine.run([Work(Sequence(), [1]) for _ in range(6)])
    for one in sequences:
        engine.release(one)


def test_common_prefix():
    assert common_prefix([1, 2, 3], [1, 2, 4, 5]) == 2
    assert common_prefix([], [1]) == 0 and common_prefix([1, 2], [1, 2]) == 2
    assert common_prefix(list(range(1000)), [*range(999), 5]) == 999


def test_prefixes_are_reused(lm, truth):
    engine = lm.engine
    engine.forget()

    def start(tokens):
        sequence = Sequence()
        return sequence, engine.reuse(sequence, tokens)

    first, reused = start(TOKENS)
    assert reused == 0
    engine.extend(first, TOKENS[:30])
    second, reused = start(TOKENS)  # copied from a slot in use
    assert reused == 30
    np.testing.assert_array_equal(engine.extend(second, TOKENS[30:])[-1], truth[-1])
    engine.release(first)
    engine.release(second)
    third, reused = start(TOKENS)
    assert reused == 39  # one token stays to be run
    np.testing.assert_array_equal(engine.extend(third, TOKENS[39:])[-1], truth[-1])
    engine.release(third)
    fourth, reused = start([*TOKENS[:6], 1, 2])
    assert reused == 6
    engine.extend(fourth, [1, 2])
    fifth, reused = start(TOKENS)  # the long rest is still there
    assert reused >= 30
    np.testing.assert_array_equal(engine.extend(fifth, TOKENS[reused:])[-1], truth[-1])
    engine.release(fourth)
    engine.release(fifth, keeps=False)


def test_sessions_in_threads(lm, truth):
    found, errors = {}, []

    def work(number):
        try:
            with lm.session() as session:
                found[number] = [session.run(TOKENS[at : at + 4]) for at in range(0, 40, 4)][-1]
        except BitwrightError as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not errors and len(found) == 6
    for logits in found.values():
        np.testing.assert_array_equal(logits, truth[-1])


def test_a_graph_that_is_no_decoder():
    import bitwright as bw

    b = bw.Builder("other")
    graph = b.build(y=b.relu(b.input("x", "f32[3]")))
    with pytest.raises(BitwrightError, match="graph 'other': the graph is no decoder"):
        Engine(Decoder(bw.compile(graph)))
