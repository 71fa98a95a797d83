"""Quantized files and kernels on other processors, emulated by qemu.

Haswell has AVX2 and FMA, Nehalem neither. Debian's `qemu-user` brings the emulator; without it the
group is skipped. Children of an emulated process are not emulated, so each engine runs in the
process that qemu starts.
"""

import os
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import bitwright as bw
from bitwright.target import machine
from quantized_kinds import KINDS, RECIPES, Draw

QEMU = shutil.which("qemu-x86_64")
PROCESSORS = ("Haswell", "Nehalem")
MINUTES = 20
FOLDER = Path(__file__).parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(QEMU is None, reason="qemu-x86_64 (Debian: qemu-user) is not installed"),
    pytest.mark.skipif(not machine().is_x86, reason="compares with x86 processors"),
]


def emulated(processor, *arguments, **environment):
    """A Python process on that processor."""
    given = {"PYTHONDONTWRITEBYTECODE": "1", "OPENBLAS_NUM_THREADS": "1", **environment}
    given["OPENBLAS_CORETYPE"] = processor  # OpenBLAS does not recognize every emulated processor
    return subprocess.run(
        [str(QEMU), "-cpu", processor, sys.executable, *map(str, arguments)],
        env={**os.environ, **given},
        capture_output=True,
        text=True,
        timeout=MINUTES * 60,
        check=False,
    )


def sqnr(exact, found):
    noise = ((exact.astype(np.float64) - found) ** 2).sum()
    return 10 * np.log10((exact.astype(np.float64) ** 2).sum() / max(noise, 1e-30))


class Case:
    """A float model, its quantized file, and the results on this machine."""

    def __init__(self, folder, kind, recipe):
        graph, feeds = KINDS[kind](Draw())
        quantized = bw.quantize(graph, [feeds() for _ in range(6)], recipe=recipe)
        self.path = folder / f"{kind}-{recipe}.onnx"
        quantized.save(self.path)
        batch = feeds()
        np.savez(self.path.with_suffix(".npz"), **batch)
        self.exact = bw.compile(graph).run(batch)["y"]
        self.ours = bw.compile(self.path, threads=1).run(batch)["y"]

    def there(self, folder, engine):
        with np.load(folder / f"{self.path.stem}.{engine}.npz") as held:
            return held["arr_0"]


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {(k, r): Case(folder, k, r) for k in KINDS for r in RECIPES}


@pytest.fixture(scope="module", params=PROCESSORS)
def processor(request):
    return request.param


@pytest.fixture(scope="module")
def answers(cases, processor, tmp_path_factory):
    """The results of both engines on the processor; the error text of one that does not start.

    Workers of pytest-xdist share one emulation: the first makes the folder, the others wait for it.
    """
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    base = tmp_path_factory.getbasetemp()
    home = (base.parent if is_worker else base) / f"emulated-{processor}"
    try:
        home.mkdir()
    except FileExistsError:
        for _ in range(MINUTES * 60):
            if (home / "done").exists():
                break
            time.sleep(1)
    else:
        for engine in ("bitwright", "onnxruntime"):
            _emulate(cases, processor, engine, home / engine)
        (home / "done").touch()
    found = {}
    for engine in ("bitwright", "onnxruntime"):
        fault = home / engine / "fault"
        found[engine] = (
            fault.read_text() if fault.exists() else partial(_answer, home / engine, engine)
        )
    assert callable(found["bitwright"]), found["bitwright"]
    return found


def _emulate(cases, processor, engine, folder):
    folder.mkdir()
    for case in cases.values():
        for suffix in (".onnx", ".npz"):
            shutil.copy(case.path.with_suffix(suffix), folder)
    cache = str(folder / "cache")
    process = emulated(processor, FOLDER / "child.py", folder, engine, BITWRIGHT_CACHE=cache)
    if process.returncode:
        (folder / "fault").write_text(process.stderr[-2000:])


def _answer(folder, engine, case):
    return case.there(folder, engine)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_our_kernels(kind, recipe, cases, processor, answers):
    case = cases[kind, recipe]
    there = answers["bitwright"](case)
    if processor == "Haswell" and machine().has_fma:
        np.testing.assert_allclose(there, case.ours, atol=1e-5 * np.abs(case.ours).max())
    # without fma floats round differently, and quantized values may differ
    assert sqnr(case.exact, there) > sqnr(case.exact, case.ours) - 1


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_files_in_onnx_runtime(kind, recipe, cases, processor, answers):
    if isinstance(answers["onnxruntime"], str):
        pytest.skip(f"ONNX Runtime does not start on {processor}: {answers['onnxruntime']}")
    case = cases[kind, recipe]
    there = answers["onnxruntime"](case)
    assert sqnr(case.exact, there) > sqnr(case.exact, case.ours) - 1


@pytest.mark.parametrize(
    "tests", ["backends/test_instr.py", "backends/test_integer_kernels.py -k signs_and_zero"]
)
def test_kernels_against_integer_arithmetic(tests, processor, tmp_path):
    file, *chosen = tests.split()
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *chosen]
    process = emulated(
        processor, *command, FOLDER.parent / file, BITWRIGHT_CACHE=str(tmp_path / "cache")
    )
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-500:]


def test_the_host_is_the_emulated_processor(processor, tmp_path):
    """Also if the cache has an entry of the real machine."""
    code = "from bitwright.target import host; print(host().cpu)"
    cache = str(tmp_path / "cache")
    for _ in range(2):
        found = emulated(processor, "-c", code, BITWRIGHT_CACHE=cache)
        assert found.stdout.strip() == processor.lower(), found.stderr[-500:]
