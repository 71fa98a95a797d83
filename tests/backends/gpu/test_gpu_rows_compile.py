"""Kernels of attention and rows compile for GPUs, with their matrix instructions."""

import pytest
from static_report import static_report

pytest.importorskip("torch")
pytest.importorskip("triton")
MATRIX = {"flash on sm_90": "wgmma", "flash on sm_80": "mma", "decode on sm_90": "mma"}
"""The matrix instruction by case."""
FEW_BYTES = 16
"""Of spilled registers per thread."""


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    return static_report("static_rows.py", tmp_path_factory)


def test_kernels_compile_with_few_spills(reports):
    assert len(reports) >= 5
    for name, report in reports.items():
        assert report["registers"] <= 255, name
        assert report["spills"] <= FEW_BYTES, (name, report)
        matrix = MATRIX.get(name.partition(":")[0])
        if matrix and "join" not in name:
            assert report["instructions"].get(matrix), (name, report)
