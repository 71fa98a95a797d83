"""The interface of executables: inputs, outputs, state, errors."""

import numpy as np
import pytest

import bitwright as bw
from bitwright.errors import BitwrightError, RunError


@pytest.fixture(scope="module")
def exe():
    b = bw.Builder("g")
    x, y = b.input("x", "f32[batch, 3]"), b.input("y", "f32[batch, 3]")
    return bw.compile(b.build(total=b.add(x, y), same=x, fixed=b.constant(np.ones(2, "f4"))))


def arrays(batch=2):
    return np.full((batch, 3), 1, "f4"), np.full((batch, 3), 2, "f4")


def test_by_name_in_order_and_by_call(exe):
    x, y = arrays()
    by_name = exe.run({"y": y, "x": x})
    assert list(by_name) == ["total", "same", "fixed"]
    assert (by_name["total"] == 3).all()
    for found in (exe.run(x, y), exe(x, y), exe({"x": x, "y": y})):
        assert (found["total"] == by_name["total"]).all()


def test_results_own_their_memory(exe):
    x, y = arrays()
    first = exe.run(x, y)
    first["same"][...] = 9
    first["fixed"][...] = 9
    assert (x == 1).all()
    assert (exe.run(x, y)["fixed"] == 1).all()
    assert not np.may_share_memory(first["same"], x)


def test_results_are_written_to_out_arrays(exe):
    x, y = arrays()
    room = np.zeros((2, 3), "f4")
    found = exe.run({"x": x, "y": y}, out={"total": room})
    assert found["total"] is room and (room == 3).all()
    with pytest.raises(RunError, match="there is no output 'totl'; expected total"):
        exe.run({"x": x, "y": y}, out={"totl": room})


@pytest.mark.parametrize(
    "feeds, message",
    [
        ({}, "input 'x' is missing; expected 'x', 'y', found none"),
        ({"x": 0, "y": 0, "z": 0}, "there is no input 'z'; expected 'x', 'y'"),
        ({"x": np.ones((2, 3)), "y": 0}, "input 'x': has the wrong element type; expected f32"),
        ({"x": np.ones(3, "f4"), "y": 0}, "input 'x': has the wrong rank"),
        (
            {"x": np.ones((2, 3), "f4"), "y": np.ones((4, 3), "f4")},
            "input 'y': has the wrong size on axis 0; expected f32[batch, 3] where batch = 2",
        ),
    ],
)
def test_errors_name_wrong_inputs(exe, feeds, message):
    with pytest.raises(RunError) as caught:
        exe.run(feeds)
    assert message in str(caught.value)


def test_too_many_positional_inputs(exe):
    with pytest.raises(RunError, match="too many inputs are given; expected 2"):
        exe.run(*arrays(), 0)


def test_state_lives_across_runs_until_reset():
    b = bw.Builder("counter")
    total = b.state("total", np.zeros(2, "f4"))
    after = b.add(total, b.input("x", "f32[2]"))
    b.update(total, after)
    exe = bw.compile(b.build(sum=after))
    step = np.array([1, 2], "f4")
    assert exe.run(step)["sum"].tolist() == [1, 2]
    assert exe.run(step)["sum"].tolist() == [2, 4]
    exe.reset()
    assert exe.run(step)["sum"].tolist() == [1, 2]


def test_every_value_can_be_observed(exe):
    seen = {}
    exe.run(dict(zip("xy", arrays(), strict=True)), observe=lambda v, a: seen.update({v.name: a}))
    assert {"x", "y", "add"} <= set(seen)


@pytest.mark.parametrize("options", [{"target": "tpu"}, {"precision": "f12"}, {"threads": 0}])
def test_options_are_checked(options):
    with pytest.raises(BitwrightError):
        bw.compile(bw.Builder("g").build(), **options)
