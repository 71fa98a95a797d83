"""Nested runs, concurrent runs, and runs in a forked child."""

import os
import signal
import threading

import numpy as np
import pytest

from bitwright.backends.cpu.runtime.run_lock import RunLock
from bitwright.errors import RunError
from bitwright.ops.control.custom import custom, register_custom
from bitwright.ops.core.builder import Builder
from bitwright.pipeline import compile_graph

SECONDS = 60
"""The time limit of processes and threads, in seconds."""
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="the system does not fork")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
X = np.arange(6, dtype=np.float32)
functions = {}


def calling(name, x):
    return functions[name](x)


register_custom(
    "nested.call", lambda x, called: x, lambda x, called: calling(called, x), replace=True
)


def calls(name, function, size="6"):
    """An executable that doubles, calls a function, and doubles again."""
    functions[name] = function
    b = Builder(name)
    x = b.mul(b.input("x", f"f32[{size}]"), 2.0)
    return compile_graph(b.build(y=b.mul(custom(b, "nested.call", x, called=name), 2.0)), threads=2)


def in_child(action):
    """Whether the action succeeds in a forked child within the time limit."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(SECONDS)
            status = 0 if action() else 2
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0


def in_threads(*actions):
    threads = [threading.Thread(target=action, daemon=True) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    return not any(thread.is_alive() for thread in threads)


@needs_fork
@pytest.mark.parametrize("threads", [1, 2])
def test_a_child_forked_while_another_thread_runs(threads):
    b = Builder("busy")
    x = b.input("x", "f32[n, 64]")
    y = b.softmax(b.matmul(b.tanh(x), b.constant(np.eye(64, dtype=np.float32))))
    executable = compile_graph(b.build(y=b.softmax(y, axis=0)), threads=threads)
    small, large = np.ones((3, 64), np.float32), np.ones((2000, 64), np.float32)
    expected, ends = executable.run({"x": small})["y"], threading.Event()

    def keep_busy():
        while not ends.is_set():
            executable.run({"x": large})

    def runs():
        return all((executable.run({"x": small})["y"] == expected).all() for _ in range(3))

    thread = threading.Thread(target=keep_busy)
    thread.start()
    try:
        assert all(in_child(runs) for _ in range(5))
    finally:
        ends.set()
        thread.join()
    assert runs()


@needs_fork
def test_a_run_continues_in_a_child_that_it_forked():
    outcome = []

    def fork(x):
        child = os.fork()
        if child == 0:
            signal.alarm(SECONDS)
            outcome.append("child")
            return x + 1
        outcome.append(os.waitpid(child, 0)[1])
        return x

    executable = calls("forks", fork)
    found = executable.run({"x": X})["y"]
    if outcome == ["child"]:
        same = (found == 4 * X + 2).all() and (executable.run({"x": X}) is not None)
        os._exit(0 if same else 3)
    assert outcome == [0]
    np.testing.assert_array_equal(found, 4 * X)


def test_a_custom_op_may_run_its_own_executable():
    def halve_and_run(x):
        return x if len(x) == 1 else np.repeat(executable.run({"x": x[::2]})["y"], 2)[: len(x)]

    executable = calls("recursion", halve_and_run, "n")

    def expected(x):
        x = 2 * x
        inner = x if len(x) == 1 else np.repeat(expected(x[::2]), 2)[: len(x)]
        return 2 * inner

    for _ in range(3):
        np.testing.assert_array_equal(executable.run({"x": X})["y"], expected(X))


def test_a_custom_op_may_wait_for_a_thread_that_runs_its_executable():
    found = []

    def ask(x):
        if threading.current_thread() is not threading.main_thread():
            return x
        assert in_threads(lambda: found.append(executable.run({"x": x})["y"]))
        return x

    executable = calls("asks", ask)
    np.testing.assert_array_equal(executable.run({"x": X})["y"], 4 * X)
    np.testing.assert_array_equal(found[0], 8 * X)


def test_executables_that_run_each_other_in_two_threads():
    begun = threading.Barrier(2)
    depth = threading.local()

    def crossing(other):
        def function(x):
            if getattr(depth, "inner", False):
                return x
            depth.inner = True
            begun.wait(SECONDS)
            return executables[other].run({"x": x})["y"]

        return function

    executables = [calls("first", crossing(1)), calls("second", crossing(0))]
    found = {}
    assert in_threads(
        *(lambda n=n: found.update({n: executables[n].run({"x": X})["y"]}) for n in (0, 1))
    )
    for result in found.values():
        np.testing.assert_array_equal(result, 16 * X)
    assert len(found) == 2


def test_a_nested_run_with_state_is_an_error():
    b = Builder("counts")
    x = b.input("x", "f32[6]")
    count = b.state("count", type_="f32[6]")
    functions["again"] = lambda x: executable.run({"x": x})["y"]
    y = custom(b, "nested.call", b.add(x, count), called="again")
    b.update(count, b.add(count, 1.0))
    executable = compile_graph(b.build(y=y), threads=1)
    with pytest.raises(RunError, match=r"under way.*state.*Compile the model again"):
        executable.run({"x": X})
    functions["again"] = lambda x: x
    np.testing.assert_array_equal(executable.run({"x": X})["y"], X)


def test_the_lock_belongs_to_one_thread():
    lock = RunLock()
    assert lock.acquire()
    assert not lock.acquire()
    found = []
    assert in_threads(lambda: found.append(lock.acquire(waits=False)))
    assert found == [False]
    lock.release()
    assert in_threads(lambda: found.append(lock.acquire()))
    assert found == [False, True]
