"""Workers compile what this process would, and their failures are no errors."""

import os
import subprocess
import sys

import pytest

from bitwright.backends.cpu import compilers, jit
from bitwright.backends.cpu.cache import ObjectCache
from bitwright.backends.cpu.emit import Module, i64
from bitwright.errors import CompileError
from bitwright.target import host


def text(number):
    module = Module(host(), f"module{number}")
    with module.function(f"answer{number}", i64, internal=False) as f:
        f.ret(f.const(i64, number))
    return module.text()


TEXTS = [text(number) for number in range(9)]


def test_workers_make_the_same_code(monkeypatch):
    monkeypatch.setenv("BITWRIGHT_COMPILERS", "2")
    made = compilers.compile_together(TEXTS, host())
    assert made == [jit.compile_object(one, host()) for one in TEXTS]


def test_workers_stay_while_they_are_kept(monkeypatch):
    monkeypatch.setenv("BITWRIGHT_COMPILERS", "2")
    expected = [jit.compile_object(one, host()) for one in TEXTS]
    with compilers.kept_workers():
        assert compilers.compile_together(TEXTS, host()) == expected
        processes = [worker._process for worker in compilers._idle]
        assert len(processes) == 2
        with compilers.kept_workers():
            assert compilers.compile_together(TEXTS[::-1], host()) == expected[::-1]
        assert {w._process for w in compilers._idle} == set(processes)
    assert not compilers._idle
    assert all(process.returncode == 0 for process in processes)


def test_a_kept_worker_that_has_died_is_replaced_by_this_process(monkeypatch, tmp_path):
    monkeypatch.setenv("BITWRIGHT_COMPILERS", "2")
    with compilers.kept_workers():
        compilers.compile_together(TEXTS, host())
        for worker in compilers._idle:
            worker._process.kill()
            worker._process.wait()
        found = jit.compiled(TEXTS, host(), ObjectCache(tmp_path))
    assert found[0] == jit.compile_object(TEXTS[0], host())


def test_a_cold_start_counts_and_a_warm_one_does_not(monkeypatch, tmp_path):
    monkeypatch.setenv("BITWRIGHT_COMPILERS", "2")
    store = ObjectCache(tmp_path)
    before = jit.compilations()
    cold = jit.compiled([*TEXTS, TEXTS[0]], host(), store)
    assert jit.compilations() == before + 9 and cold[0] == cold[-1]
    assert jit.compiled([*TEXTS, TEXTS[0]], host(), store) == cold
    assert jit.compilations() == before + 9
    assert len(list(tmp_path.iterdir())) == 9


@pytest.mark.parametrize("count, compilers_", [(3, "8"), (9, "1"), (0, "2")])
def test_few_modules_are_compiled_here(monkeypatch, count, compilers_):
    monkeypatch.setitem(sys.modules, "llvmlite.binding", None)  # as if LLVM were loaded
    monkeypatch.setenv("BITWRIGHT_COMPILERS", compilers_)
    monkeypatch.setattr(subprocess, "Popen", None)
    assert compilers.compile_together(TEXTS[:count], host()) is None


@pytest.mark.parametrize("program", ["", "/nowhere/python3", "/bin/false", "python-that-is-not"])
def test_without_workers_it_is_done_here(monkeypatch, tmp_path, program):
    monkeypatch.setenv("BITWRIGHT_COMPILERS", "2")
    monkeypatch.setattr(sys, "executable", program)
    assert compilers.compile_together(TEXTS, host()) is None
    found = jit.compiled(TEXTS, host(), ObjectCache(tmp_path))
    assert found[0] == jit.compile_object(TEXTS[0], host())


def test_a_module_that_llvm_refuses_is_named_here(monkeypatch, tmp_path):
    monkeypatch.setenv("BITWRIGHT_COMPILERS", "2")
    with pytest.raises(CompileError, match="LLVM refuses"):
        jit.compiled([*TEXTS, "define nothing"], host(), ObjectCache(tmp_path))


def test_a_process_that_compiles_little_does_not_load_llvm(tmp_path):
    code = (
        "import sys, numpy as np, bitwright as bw; b = bw.Builder('small'); "
        "exe = bw.compile(b.build(b.relu(b.input('x', 'f32[3]')))); "
        "exe.run({'x': np.ones(3, np.float32)}); print('llvmlite.binding' in sys.modules)"
    )
    environment = {**os.environ, "BITWRIGHT_CACHE": str(tmp_path), "BITWRIGHT_COMPILERS": "2"}
    for _ in range(2):  # the first also asks LLVM what the processor is, and keeps the answer
        for file in (tmp_path / "objects").glob("*"):
            file.unlink()
        run = subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            env=environment,
            capture_output=True,
            text=True,
        )
    assert run.stdout.strip() == "False", run.stderr
