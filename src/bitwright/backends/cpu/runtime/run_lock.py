"""The lock of a program: runs share its memory, so only one is in progress at a time.

Waiting would deadlock in a run that begins inside another one of the same thread (a custom op may
start it), and in a forked child whose parent had a run in progress in another thread.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager


class RunLock:
    """A lock that records its owner and is free in a forked child."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        self.was_interrupted = False
        """Whether a fork ended a run of another thread, which may have left partial results."""
        _all.add(self)

    def acquire(self, waits: bool = True) -> bool:
        """Take the lock; False if waiting for it might never end.

        With `waits` False, the answer is also False while another thread holds the lock.
        """
        if not self._lock.acquire(blocking=False):
            if not waits or self._owner == threading.get_ident():
                return False
            self._lock.acquire()
        self._owner = threading.get_ident()
        return True

    def release(self) -> None:
        self._owner = None
        self._lock.release()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock, unless this thread already does."""
        is_new = self.acquire()
        try:
            yield
        finally:
            if is_new:
                self.release()

    def _after_fork(self) -> None:
        """Only the forking thread exists in the child; its own run continues."""
        if self._lock.locked() and self._owner != threading.get_ident():
            self._lock, self._owner = threading.Lock(), None
            self.was_interrupted = True


_all: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _renew_after_fork() -> None:
    for lock in list(_all):
        lock._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_after_fork)
