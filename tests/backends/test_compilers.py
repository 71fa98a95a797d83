"""Workers compile the same code as this process, and their failures are not errors."""

import os
import subprocess
import sys
import threading
import time

import pytest

from bitwright import system
from bitwright.backends.cpu.cache.objects import ObjectCache
from bitwright.backends.cpu.codegen import compilers, jit
from bitwright.backends.cpu.codegen.emit import Module, i64
from bitwright.errors import CompileError
from bitwright.target import host


def text(number):
    module = Module(host(), f"module{number}")
    with module.function(f"answer{number}", i64, internal=False) as f:
        f.ret(f.const(i64, number))
    return module.text()


TEXTS = [text(number) for number in range(9)]
start_python = system.start_python


@pytest.fixture(autouse=True)
def two_workers(monkeypatch):
    monkeypatch.setenv("BITWRIGHT_COMPILERS", "2")
    monkeypatch.setattr(compilers._pool, "_has_failed", False)


def workers():
    with compilers._pool.changed:
        return set(compilers._pool.workers)


def made(texts=TEXTS):
    jobs = [compilers.submit(one, host()) for one in texts]
    return [job.result() for job in jobs]


def test_workers_compile_the_same_code():
    assert jit.compile_objects(TEXTS, host()) == [jit.compile_object(one, host()) for one in TEXTS]


def test_then_is_called_before_result_returns():
    told, before = [], jit.compilations()
    with compilers.hold_workers():
        jobs = [compilers.submit(one, host(), told.append) for one in TEXTS]
        assert all(job.result() in told for job in jobs)
    assert jit.compilations() == before + len(TEXTS) and not any(job.text for job in jobs)


def test_pending_jobs_are_compiled_without_a_waiter(monkeypatch):
    monkeypatch.setattr(jit, "compile_object", None)
    told = [threading.Event() for _ in TEXTS]
    jobs = [
        compilers.submit(one, host(), lambda _, event=event: event.set())
        for one, event in zip(TEXTS, told, strict=True)
    ]
    assert all(event.wait(100) for event in told)
    assert all(job.result() for job in jobs)


def test_unreferenced_jobs_are_dropped():
    compilers.submit(TEXTS[0], host())
    assert made(TEXTS[1:]) == [jit.compile_object(one, host()) for one in TEXTS[1:]]
    assert not compilers._pool._waiting


def test_held_workers_stay_alive():
    expected = [jit.compile_object(one, host()) for one in TEXTS]
    with compilers.hold_workers():
        assert made() == expected
        found = workers()
        assert len(found) == 2
        with compilers.hold_workers():
            assert made(TEXTS[::-1]) == expected[::-1]
        assert workers() == found
    for worker in found:
        worker.join(100)
        assert worker.process.returncode == 0
    assert not workers()


@pytest.mark.parametrize("count, started", [(0, 0), (1, 1), (2, 2), (5, 2)])
def test_workers_start_early_when_requested(monkeypatch, count, started):
    monkeypatch.delitem(sys.modules, "llvmlite.binding", raising=False)  # as if it were not loaded
    monkeypatch.setattr(compilers._pool, "_starts", 0)
    with compilers.hold_workers(count):
        found = workers()
        assert len(found) == started
    for worker in found:
        worker.join(100)
    assert not workers()


def test_a_process_with_llvm_starts_no_worker_early(monkeypatch):
    monkeypatch.setitem(sys.modules, "llvmlite.binding", None)
    with compilers.hold_workers(2):
        assert not workers()


def test_this_process_compiles_when_a_held_worker_dies(tmp_path):
    with compilers.hold_workers():
        made()
        for worker in workers():
            worker.process.kill()
            worker.process.wait()
        found = jit.compiled(TEXTS, host(), ObjectCache(tmp_path))
    assert found[0] == jit.compile_object(TEXTS[0], host())


def test_a_worker_that_times_out_is_killed(monkeypatch):
    monkeypatch.setattr(compilers, "_TIMEOUT_SECONDS", 0)
    monkeypatch.setattr(
        system, "start_python", lambda _: start_python("import time; time.sleep(1000)")
    )
    with compilers.hold_workers():
        assert made() == [jit.compile_object(one, host()) for one in TEXTS]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_process_compiles_without_the_workers(monkeypatch):
    monkeypatch.setattr(system, "start_python", lambda _: start_python("input()"))
    with compilers.hold_workers():
        jobs = [compilers.submit(one, host()) for one in TEXTS]
        child = os.fork()
        if not child:
            os._exit(0 if jobs[0].result() == jit.compile_object(TEXTS[0], host()) else 1)
        assert os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.parametrize("moment", ["after the start", "during the start"])
def test_workers_end_while_a_forked_process_runs(monkeypatch, moment):
    begun = threading.Event()

    def start(code):
        process = start_python(code)
        begun.set()
        time.sleep(0.2)  # the caller does not know the process yet
        return process

    if moment == "during the start":
        monkeypatch.setattr(system, "start_python", start)
    with compilers.hold_workers():
        jobs = [compilers.submit(one, host()) for one in TEXTS]
        if moment == "during the start":
            assert begun.wait(100)
        else:
            assert all(job.result() for job in jobs)
        found = workers()
        source, sink = os.pipe()
        child = os.fork()
        if not child:
            os.close(sink)
            os.read(source, 1)  # until the parent is done
            os._exit(0)
        assert all(job.result() for job in jobs)
    for worker in found:
        worker.join(100)
    is_left = any(worker.is_alive() for worker in found)
    os.close(sink)
    os.waitpid(child, 0)
    os.close(source)
    assert found and not is_left


def test_compiles_here_if_threads_cannot_start(monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    expected = [jit.compile_object(one, host()) for one in TEXTS]
    monkeypatch.setattr(compilers._Worker, "start", refuse)
    monkeypatch.setattr(compilers, "_pool", compilers._Pool())
    monkeypatch.delitem(sys.modules, "llvmlite.binding", raising=False)  # as if it were not loaded
    with compilers.hold_workers(2):
        assert made() == expected
    assert not workers()


def test_a_malformed_request_ends_the_worker():
    process = start_python("from bitwright.backends.cpu.codegen.compilers import work; work()")
    process.stdin.write(b"nothing\n")
    process.stdin.flush()
    assert process.wait(100) == 0
    process.communicate()


def test_a_cold_start_counts_and_a_warm_one_does_not(tmp_path):
    store = ObjectCache(tmp_path)
    before = jit.compilations()
    cold = jit.compiled([*TEXTS, TEXTS[0]], host(), store)
    assert jit.compilations() == before + 9 and cold[0] == cold[-1]
    assert jit.compiled([*TEXTS, TEXTS[0]], host(), store) == cold
    assert jit.compilations() == before + 9
    assert len(list(tmp_path.iterdir())) == 9


@pytest.mark.parametrize("count, compilers_", [(3, "8"), (9, "1"), (0, "2")])
def test_this_process_compiles_few_modules(monkeypatch, count, compilers_):
    expected = [jit.compile_object(one, host()) for one in TEXTS[:count]]  # LLVM is loaded now
    monkeypatch.setenv("BITWRIGHT_COMPILERS", compilers_)
    monkeypatch.setattr(subprocess, "Popen", None)
    assert jit.compile_objects(TEXTS[:count], host()) == expected


@pytest.mark.parametrize("program", ["", "/nowhere/python3", "/bin/false", "python-that-is-not"])
def test_compiles_here_without_workers(monkeypatch, tmp_path, program):
    monkeypatch.setattr(sys, "executable", program)
    found = jit.compiled(TEXTS, host(), ObjectCache(tmp_path))
    assert found[0] == jit.compile_object(TEXTS[0], host())


def test_a_module_that_llvm_refuses_raises_here(tmp_path):
    with pytest.raises(CompileError, match="LLVM refuses"):
        jit.compiled([*TEXTS, "define nothing"], host(), ObjectCache(tmp_path))


def test_a_process_that_compiles_little_does_not_load_llvm(tmp_path):
    code = (
        "import sys, numpy as np, bitwright as bw; b = bw.Builder('small'); "
        "exe = bw.compile(b.build(b.relu(b.input('x', 'f32[3]')))); "
        "exe.run({'x': np.ones(3, np.float32)}); print('llvmlite.binding' in sys.modules)"
    )
    environment = {**os.environ, "BITWRIGHT_CACHE": str(tmp_path), "BITWRIGHT_COMPILERS": "2"}
    for _ in range(2):  # the first run also detects the processor with LLVM and caches the result
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
