"""Workers without a processor of their own take no part for a while, and results do not change."""

import numpy as np

from bitwright.backends.cpu.runtime import contention
from bitwright.backends.cpu.runtime import shared_block as shared
from bitwright.backends.cpu.runtime.contention import Contention


class Machine:
    """A clock and the waiting times of threads, in place of the system's."""

    def __init__(self, monkeypatch, workers=3):
        self.now, self.waited = 100.0, {}
        monkeypatch.setattr(contention.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(contention.threading, "get_native_id", lambda: 0)
        monkeypatch.setattr(contention, "waiting_nanoseconds", lambda t: self.waited.get(t, 0))
        self.words = np.zeros(shared.shared_bytes(workers + 1) // 8, np.uint64)
        self.words[shared.STEAL_SPINS // 8] = 40
        self.watch = Contention(self.words, range(1, workers + 1))
        self.workers = workers

    def run(self, seconds, sleeps=0, **waited):
        """A run of this length, of which threads wait a share."""
        self.now += seconds
        for thread, share in waited.items():
            number = int(thread[1:])
            self.waited[number] = self.waited.get(number, 0) + int(share * seconds * 1e9)
        self.words[shared.SLEEPS // 8] += np.uint64(sleeps)
        self.watch.after_run()

    def excluded(self):
        places = range(1, self.workers + 1)
        found = [n for n in places if self.words[(shared.EXCLUDED + n * shared.LINE) // 8]]
        assert self.words[shared.ACTIVE // 8] == self.workers - len(found)
        return found


def test_a_worker_that_waits_is_excluded_and_tried_again(monkeypatch):
    machine = Machine(monkeypatch)
    machine.run(1.0, sleeps=1)
    machine.run(0.01, sleeps=3, t2=0.6, t1=0.1)
    assert machine.excluded() == [2]
    machine.run(contention.FIRST_SECONDS / 2, sleeps=1)
    assert machine.excluded() == [2]
    machine.run(contention.FIRST_SECONDS)
    assert machine.excluded() == []
    for pause in (2, 4, 8, 8):  # it waits longer each time, up to a limit
        machine.run(0.01, sleeps=1, t2=0.6)
        assert machine.excluded() == [2]
        machine.run(min(pause * contention.FIRST_SECONDS, contention.LAST_SECONDS) * 0.9)
        assert machine.excluded() == [2]
        machine.run(contention.LAST_SECONDS)
        assert machine.excluded() == []


def test_short_waits_and_waits_without_sleeps_exclude_nobody(monkeypatch):
    machine = Machine(monkeypatch)
    machine.run(1.0, sleeps=1)
    for _ in range(20):
        machine.run(0.01, sleeps=1, t1=0.4, t2=0.4)
    machine.run(0.01, t3=1.0)
    machine.run(0.5, sleeps=1)
    assert machine.excluded() == []


def test_the_caller_gets_the_processor_of_a_worker(monkeypatch):
    machine = Machine(monkeypatch, workers=1)
    machine.run(1.0, sleeps=1)
    machine.run(0.01, sleeps=1, t0=0.5)
    assert machine.excluded() == [1]
    assert machine.words[shared.STEAL_SPINS // 8] == 1
    machine.run(contention.LAST_SECONDS)
    assert machine.excluded() == [] and machine.words[shared.STEAL_SPINS // 8] == 40


def test_waiting_times_of_threads_that_do_not_exist_are_unknown():
    assert contention.waiting_nanoseconds(None) is None
    assert contention.waiting_nanoseconds(1 << 30) is None


def test_other_callers_exclude_nobody(monkeypatch):
    """The time that another caller waited long ago says nothing about this one."""
    machine = Machine(monkeypatch)
    machine.run(1.0, sleeps=1)
    machine.waited[9] = int(60e9)
    monkeypatch.setattr(contention.threading, "get_native_id", lambda: 9)
    machine.run(0.01, sleeps=1)
    assert machine.excluded() == []
    machine.run(0.01, sleeps=1, t9=0.6)
    assert machine.excluded() != []
