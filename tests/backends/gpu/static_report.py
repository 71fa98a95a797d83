"""Runs a script that compiles kernels without a GPU, outside of Triton's interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def static_report(script: str, tmp_path_factory: Any) -> Any:
    """What a script of this folder prints as JSON in its last line."""
    folder = str(tmp_path_factory.mktemp("triton"))
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": folder}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / script)],
        check=False,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
