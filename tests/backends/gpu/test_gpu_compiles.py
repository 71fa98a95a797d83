"""Every kernel family compiles for sm_80 and sm_90 with Triton's own compiler, without a GPU.

It runs in another process, because kernels of this one are interpreted.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("capability", ["8.0", "9.0"])
def test_every_family_compiles(tmp_path, capability):
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_static.py"), "--families"]
    command += ["--capability", capability, "--json", str(tmp_path / "reports.json")]
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    reports = json.loads((tmp_path / "reports.json").read_text())
    families = {report["name"].rpartition("_")[0] for report in reports}
    assert {"lookup_table_8", "pad_constant_32", "copy_32"} <= families
    assert all(report["registers"] > 0 for report in reports)
