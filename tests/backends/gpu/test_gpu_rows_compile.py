"""Kernels of attention and rows compile for GPUs, with their matrix instructions."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")
MATRIX = {"flash on sm_90": "wgmma", "flash on sm_80": "mma", "decode on sm_90": "mma"}
"""The matrix instruction by case."""
FEW_BYTES = 16
"""Of spilled registers per thread."""


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    script = Path(__file__).parent / "static_rows.py"
    folder = str(tmp_path_factory.mktemp("triton"))
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": folder}
    done = subprocess.run(
        [sys.executable, str(script)], check=False, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_kernels_compile_with_few_spills(reports):
    assert len(reports) >= 5
    for name, report in reports.items():
        assert report["registers"] <= 255, name
        assert report["spills"] <= FEW_BYTES, (name, report)
        matrix = MATRIX.get(name.partition(":")[0])
        if matrix and "join" not in name:
            assert report["instructions"].get(matrix), (name, report)
