"""ONNX's official cases: the number that pass, none wrong, and the number with fallbacks."""

from collections import Counter
from importlib.util import find_spec

import onnx
import pytest

from bitwright.frontend.onnx import conformance
from bitwright.report.coverage import Compiled

pytestmark = pytest.mark.skipif(
    not onnx.__version__.startswith("1.23."), reason="the cases are those of onnx 1.23"
)
CASES = 2024
PASSING = 2007
IMAGE_CASES = 9 if find_spec("PIL") else 0  # reading images needs Pillow
RANDOM = 6
HOST_STEPS = 164
"""Cases with a node that has no kernel, including those that read images."""
ROUNDED = {"test_attention_4d_causal_fp16_expanded"}
"""Attention in single f16 steps: two results are closer to the exact ones than those expected,
and differ from them by more than 1e-3. Compiling puts the steps together again."""


@pytest.fixture(scope="module")
def results():
    return list(conformance.run_all(prepare=Compiled))


def names(results, status):
    return {r.name for r in results if r.status == status}


def test_all_cases_are_there(results):
    assert len(results) == CASES
    assert Counter(r.kind for r in results)["node"] == 1884


def test_none_is_wrong(results):
    assert {r.name: r.reason for r in results if r.status == conformance.WRONG} == {}


def test_the_number_that_pass_only_grows(results):
    assert len(names(results, conformance.PASS)) == PASSING + IMAGE_CASES
    assert len(names(results, conformance.RANDOM)) == RANDOM


def test_refusals_name_op_and_reason(results):
    for result in results:
        if result.status == conformance.REFUSED:
            assert any(op in result.reason for op in result.ops), result.reason
            assert len(result.reason) > 40


def test_few_cases_contain_a_fallback(results):
    found = [r.name for r in results if r.fallback_ops]
    assert len(found) <= HOST_STEPS, sorted(found)
    assert HOST_STEPS <= 0.15 * CASES


@pytest.mark.slow
def test_the_interpreter_passes_too():
    found = list(conformance.run_all())
    assert names(found, conformance.WRONG) == ROUNDED
    assert len(names(found, conformance.PASS)) == PASSING - len(ROUNDED) + IMAGE_CASES
