"""Every sample of every op: exported, checked, run outside bitwright, compared with the reference.

The cases that ONNX Runtime does not run, or runs incorrectly, are listed here, and ONNX's reference
evaluator runs them instead. A case that is missing from a list, or listed without need, fails.
"""

import pytest
from onnx_runs import assert_same, checked, element, one_node, run_ort, run_reference
from pins import CRASHES_ORT, DIFFERS_IN_ORT, NO_ONNX_FORM, NO_RUNTIME, NOT_IN_ORT, RANDOM

from bitwright.errors import ExportError
from bitwright.ops.core.interpret import run
from bitwright.ops.core.opdef import Kind
from bitwright.ops.core.registry import all_ops

OPS = {name: op for name, op in all_ops().items() if op.kind is not Kind.BOUNDARY}
CASES = [
    pytest.param(op, case, f"{op.name}-{i}", id=f"{op.name}-{i}")
    for op in OPS.values()
    for i, case in enumerate(op.samples())
]


def _kind(op, case):
    """The name of a case in the lists: its op and its rarest element type."""
    elements = [element(x).name for x in case.inputs if x is not None]
    elements += [str(case.attrs[key]) for key in ("to", "dtype") if key in case.attrs]
    common = {"bool": 0, "i64": 1, "f32": 2, "i32": 3}
    ranked = sorted(elements or ["f32"], key=lambda name: common.get(name, 4))
    return f"{op.name} {ranked[-1]}"


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
    if name in DIFFERS_IN_ORT:
        model = checked(graph, opset=DIFFERS_IN_ORT[name])
    found = _run(model, feeds, op, case, name)
    if op.name in RANDOM:
        for key, array in expected.items():
            assert (found[key].shape, found[key].dtype) == (array.shape, array.dtype)
    else:
        assert_same(found, expected, 2 * max(case.tolerance, 1e-5))


def _run(model, feeds, op, case, name):
    if name in CRASHES_ORT or name in DIFFERS_IN_ORT:
        return run_reference(model, feeds)
    try:
        return run_ort(model, feeds)
    except Exception as refusal:  # the bindings raise many types
        if _kind(op, case) not in NOT_IN_ORT:
            raise AssertionError(f"ONNX Runtime refuses {_kind(op, case)!r}: {refusal}") from None
        return run_reference(model, feeds)


def test_pins_name_ops_that_exist():
    named = [*NO_ONNX_FORM, *CRASHES_ORT, *DIFFERS_IN_ORT, *NO_RUNTIME]
    cases = {param.values[2] for param in CASES}
    assert [name for name in named if name not in cases and name not in OPS] == []
    assert [name for name in NOT_IN_ORT if name.split()[0] not in OPS] == []
    assert [name for name in RANDOM if name not in OPS] == []


def test_how_much_runs_where_is_pinned():
    """The counts change only with the lists."""
    forms = {name.split("-")[0] for name in NO_ONNX_FORM} - {"cast", "matmul"}
    assert len(OPS) - len(forms) >= 174
    assert len(NOT_IN_ORT) <= 132
