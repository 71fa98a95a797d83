"""Thread pools: every step on every thread, barriers between phases, sleep between runs."""

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from emitted import Compiled

from bitwright import system
from bitwright.backends.cpu.codegen import jit
from bitwright.backends.cpu.codegen.emit import Module, Signature, i32, i64
from bitwright.backends.cpu.runtime import pool as pool_module
from bitwright.backends.cpu.runtime import shared_block as shared
from bitwright.backends.cpu.runtime.emitted import runtime_text
from bitwright.backends.cpu.runtime.native import runtime
from bitwright.backends.cpu.runtime.pool import Pool, shared_pool
from bitwright.backends.cpu.runtime.shared_block import ALONE, BARRIER_AFTER, step_table
from bitwright.errors import RunError
from bitwright.target import host, named

SLOTS = 8
"""Elements between the values of two threads, so that they are in different cache lines."""


def relay_module():
    """Each thread adds its neighbour's value of the previous step to its own."""
    module = Module(host())
    with module.kernel("relay", Signature(("source", "result"))) as f:
        after = f.thread + 1
        neighbour = f.select(f.eq(after, f.threads), 0, after)
        there = f.load(i64, f.args.pointer("source"), neighbour * SLOTS)
        f.store(there + 1, f.args.pointer("result"), f.thread * SLOTS)
    return module


def processor_module():
    """A function that always returns processor 5."""
    module = Module(host())
    with module.function("five", i32, (), internal=False) as f:
        f.ret(f.const(i32, 5))
    return module


@pytest.fixture(scope="module")
def relay():
    return Compiled(relay_module())


class Relay:
    """A table of steps that pass values between threads, and its buffers."""

    def __init__(self, compiled, threads, count=200):
        self.threads, self.count, self.compiled = threads, count, compiled
        self.buffers = [np.zeros(threads * SLOTS, np.int64) for _ in range(2)]
        signature, address = compiled.module.signatures["relay"], compiled.library.address("relay")
        pairs = (self.buffers, self.buffers[::-1])
        self.tables = [signature.pack(source=a.ctypes.data, result=b.ctypes.data) for a, b in pairs]
        self.steps = step_table(
            [(address, self.tables[n % 2].ctypes.data, BARRIER_AFTER) for n in range(count)]
        )

    def run(self, pool):
        pool.run(self.steps.ctypes.data, self.count)

    def check(self, runs):
        expected = runs * self.count
        assert self.buffers[0][::SLOTS].tolist() == [expected] * self.threads


NATIVE = pytest.mark.parametrize("native", [True, False], ids=["futex", "semaphores"])


@NATIVE
@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_every_thread_runs_every_step_in_order(relay, threads, native):
    pool, work = Pool(threads, native), Relay(relay, threads)
    for _ in range(5):
        work.run(pool)
    work.check(5)
    pool.close()
    work.run(pool)  # starts again
    work.check(6)
    pool.close()


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_a_caller_without_workers_runs_all_parts(relay, threads):
    """A preempted worker does not delay a run: here there are no workers at all."""
    block = pool_module._shared_block(threads)
    words = block.view(np.uint64)
    words[shared.THREADS // 8] = threads
    words[[shared.SPINS // 8, shared.STEAL_SPINS // 8]] = 1
    work = Relay(relay, threads, count=20)
    for runs in range(1, 4):
        runtime().start(block.ctypes.data, work.steps.ctypes.data, work.count)
        work.check(runs)


@pytest.mark.parametrize("excluded", [(1,), (2,), (1, 2)])
def test_the_others_run_the_parts_of_excluded_workers(relay, excluded):
    pool, work = Pool(3), Relay(relay, 3)
    work.run(pool)
    workers = pool._workers
    for number in excluded:
        workers.words[(shared.EXCLUDED + number * shared.LINE) // 8] = 1
    workers.words[shared.ACTIVE // 8] = 2 - len(excluded)
    for _ in range(3):
        work.run(pool)
    work.check(4)
    pool.close()


def test_one_thread_runs_small_phases(relay):
    """The kernel is called once, as thread 0 of 1, by any thread."""
    pool, work = Pool(3), Relay(relay, 3, count=50)
    work.steps[:, 2] = ALONE
    work.run(pool)
    assert work.buffers[0][::SLOTS].tolist() == [50, 0, 0]
    pool.run(work.steps.ctypes.data, work.count, alone=True)
    assert work.buffers[0][::SLOTS].tolist() == [100, 0, 0]
    work.steps[:, 2] = np.where(np.arange(50) % 2, BARRIER_AFTER, ALONE | BARRIER_AFTER)
    work.run(pool)
    pool.close()


def test_workers_avoid_the_callers_processor(relay, monkeypatch):
    """Threads that share a processor would wait for each other at every barrier."""
    excluded = []
    monkeypatch.setattr(
        system, "exclude_processor", lambda threads, processor: excluded.append(processor)
    )
    monkeypatch.setattr(system, "processor_function", lambda: 0)
    pool, work = Pool(2), Relay(relay, 2)
    work.run(pool)
    assert not excluded  # the processor of a thread is unknown
    five = Compiled(processor_module())
    pool._workers.words[shared.COLLIDED // 8] = 1  # as a worker on the caller's processor does
    pool._workers.words[shared.PROCESSOR // 8] = five.library.address("five")
    work.run(pool)
    assert excluded == [5]
    work.check(2)
    pool.close()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads cannot be placed")
def test_a_processor_is_excluded_only_if_others_remain():
    allowed = os.sched_getaffinity(0)
    one = next(iter(allowed))
    here = threading.get_native_id()
    try:
        system.exclude_processor([here] * (len(allowed) + 1), one)
        assert os.sched_getaffinity(0) == allowed
        system.exclude_processor([here], one)
        assert os.sched_getaffinity(0) == (allowed - {one} or allowed)
    finally:
        os.sched_setaffinity(0, allowed)


def test_one_thread_starts_no_worker(relay):
    before = threading.active_count()
    pool, work = Pool(1), Relay(relay, 1)
    work.run(pool)
    work.check(1)
    assert threading.active_count() == before


def test_an_empty_table_is_fine():
    pool = Pool(2)
    pool.run(0, 0)
    pool.close()


def test_no_threads_is_an_error():
    with pytest.raises(RunError, match="at least one thread"):
        Pool(0)


@NATIVE
def test_idle_workers_use_no_processor_time(relay, native):
    pool, work = Pool(3, native), Relay(relay, 3)
    work.run(pool)
    time.sleep(0.05)
    used = []
    for _ in range(4):  # other threads of the test process may run in some rounds
        before = time.process_time()
        time.sleep(0.2)
        used.append(time.process_time() - before)
    pool.close()
    assert min(used) < 0.004, f"{min(used) * 1e3:.1f} ms in 200 ms of rest"


def test_workers_sleep_within_a_millisecond(relay):
    """After a run, each thread uses less than a millisecond of processor time."""
    pool, work = Pool(2), Relay(relay, 2)
    work.run(pool)
    used = []
    for _ in range(20):
        work.run(pool)
        before = time.process_time()
        time.sleep(0.02)
        used.append(time.process_time() - before)
    pool.close()
    assert sorted(used)[10] < 1e-3


def test_many_python_threads_and_pools_at_once(relay):
    pools = [Pool(2), Pool(3), shared_pool(2)]
    jobs = [Relay(relay, pool.threads) for pool in pools for _ in range(2)]
    failures = []

    def work(job, pool):
        try:
            for _ in range(20):
                job.run(pool)
            job.check(20)
        except AssertionError as error:
            failures.append(error)

    callers = [
        threading.Thread(target=work, args=(job, pools[number // 2]))
        for number, job in enumerate(jobs)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for pool in pools:
        pool.close()
    assert not failures


def test_pools_of_one_size_are_shared_while_in_use():
    assert shared_pool(2) is shared_pool(2)
    assert shared_pool(2) is not shared_pool(3)


def test_an_unused_pool_ends_its_workers(relay):
    before = threading.active_count()
    pool, work = Pool(3), Relay(relay, 3)
    work.run(pool)
    assert threading.active_count() == before + 2
    del pool
    assert threading.active_count() == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system does not fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_its_own_workers(relay):
    pool, work = Pool(2), Relay(relay, 2)
    work.run(pool)
    child = os.fork()
    if child == 0:
        work.run(pool)
        status = 0 if work.buffers[0][0] == 2 * work.count else 1
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    work.run(pool)
    work.check(2)
    pool.close()


def test_ctrl_c_leaves_the_pool_usable(relay, interruptible):
    pool, work, runs = Pool(2), Relay(relay, 2), 0
    timer = threading.Timer(0.05, signal.raise_signal, (signal.SIGINT,))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        while True:
            work.run(pool)
            runs += 1
    timer.join()
    done = int(work.buffers[0][0]) // work.count
    assert done in (runs, runs + 1)
    work.run(pool)
    work.check(done + 1)
    pool.close()


PROGRAM = """
import sys
sys.path.insert(0, {here!r})
from emitted import Compiled
from test_threads import Relay, relay_module
from bitwright.backends.cpu.runtime.pool import Pool
pool = Pool(3, native={native})
work = Relay(Compiled(relay_module()), 3)
work.run(pool)
work.check(1)
print("done", flush=True)
{ending}
"""


@NATIVE
@pytest.mark.parametrize("ending", ["", "sys.exit(0)", "raise SystemExit"])
def test_the_interpreter_ends_without_a_hang(native, ending):
    here = os.path.dirname(__file__)
    program = PROGRAM.format(here=here, native=native, ending=ending)
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False
    )
    assert (result.returncode, result.stdout.strip(), result.stderr) == (0, "done", "")


def test_a_pool_survives_a_system_without_futex(relay, monkeypatch):
    monkeypatch.setattr(system, "futex", lambda: None)
    monkeypatch.setattr(system, "yield_function", lambda: 0)
    pool, work = Pool(3), Relay(relay, 3, count=2)
    work.run(pool)
    work.check(1)
    pool.close()


@pytest.mark.parametrize("name", ["aarch64", "riscv64"])
def test_the_runtime_compiles_for_other_machines(name):
    assert "take_part" in jit.assembly(runtime_text(named(name)), named(name))
