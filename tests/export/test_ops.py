"""Every sample of every op: exported, checked, run outside bitwright, compared with the reference.

ONNX Runtime runs what it can. What it cannot run, or gets wrong, is listed here, and ONNX's own
reference evaluator runs it instead; a case that leaves a list, or wants to enter one, fails.
"""

import pytest
from onnx_runs import assert_same, checked, element, one_node, run_ort, run_reference
from pins import (
    CRASHES_ORT,
    DIFFERS_IN_BOTH,
    DIFFERS_IN_ORT,
    NO_ONNX_FORM,
    NO_RUNTIME,
    NOT_IN_ORT,
    RANDOM,
)

from bitwright.errors import ExportError
from bitwright.ops.interpret import run
from bitwright.ops.opdef import Kind
from bitwright.ops.registry import all_ops

OPS = {name: op for name, op in all_ops().items() if op.kind is not Kind.BOUNDARY}
CASES = [
    pytest.param(op, case, f"{op.name}-{i}", id=f"{op.name}-{i}")
    for op in OPS.values()
    for i, case in enumerate(op.samples())
]


def _kind(op, case):
    """How the lists name a case: its op and the element type that makes it special."""
    elements = [element(x).name for x in case.inputs if x is not None]
    elements += [str(case.attrs[key]) for key in ("to", "dtype") if key in case.attrs]
    rare = [name for name in elements if name not in ("f32", "i64", "i32", "bool")]
    return f"{op.name} {rare[0]}" if rare else op.name


@pytest.mark.parametrize("op, case, name", CASES)
def test_sample_runs_elsewhere(op, case, name):
    graph, feeds = one_node(op, case)
    if name in NO_ONNX_FORM or op.name in NO_ONNX_FORM:
        with pytest.raises(ExportError, match=f"{op.name} has no form in ONNX"):
            checked(graph)
        return
    model = checked(graph)
    if name in NO_RUNTIME:
        return
    expected = run(graph, feeds)
    found = _run(model, feeds, op, case, name)
    if op.name in RANDOM:
        for key, array in expected.items():
            assert (found[key].shape, found[key].dtype) == (array.shape, array.dtype)
    elif name not in DIFFERS_IN_BOTH:
        assert_same(found, expected, 2 * max(case.tolerance, 1e-5))


def _run(model, feeds, op, case, name):
    if name in CRASHES_ORT or name in DIFFERS_IN_ORT:
        return run_reference(model, feeds)
    try:
        return run_ort(model, feeds)
    except Exception as refusal:  # the bindings raise many kinds
        if _kind(op, case) not in NOT_IN_ORT:
            raise AssertionError(f"ONNX Runtime refuses {_kind(op, case)!r}: {refusal}") from None
        return run_reference(model, feeds)


def test_pins_name_ops_that_exist():
    named = [*NO_ONNX_FORM, *CRASHES_ORT, *DIFFERS_IN_ORT, *DIFFERS_IN_BOTH, *NO_RUNTIME]
    cases = {param.values[2] for param in CASES}
    assert [name for name in named if name not in cases and name not in OPS] == []
    assert [name for name in NOT_IN_ORT if name.split()[0] not in OPS] == []
    assert [name for name in RANDOM if name not in OPS] == []
