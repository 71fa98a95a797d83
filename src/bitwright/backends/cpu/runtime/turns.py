"""Whose turn it is to run a program: runs of one program share its memory, so they follow each
other.

Waiting would never end for a run that begins inside another one of the same thread, such as one
that a custom op starts, or in a forked child whose parent had a run under way in another thread.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """A lock that knows its owner, and that a forked child finds free."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        self.was_cut_off = False
        """Whether a run was under way in a thread that this process does not have: what it was
        writing may be half written."""
        _all.add(self)

    def begin(self, waits: bool = True) -> bool:
        """Take the turn; False where another run has it and waiting for that one might never end.

        `waits` False gives that answer for runs of other threads too.
        """
        if not self._lock.acquire(blocking=False):
            if not waits or self._owner == threading.get_ident():
                return False
            self._lock.acquire()
        self._owner = threading.get_ident()
        return True

    def end(self) -> None:
        self._owner = None
        self._lock.release()

    @contextmanager
    def held(self) -> Iterator[None]:
        """No run begins within it, but for one that this thread has under way already."""
        is_new = self.begin()
        try:
            yield
        finally:
            if is_new:
                self.end()

    def _after_fork(self) -> None:
        """Only the thread that forked is left; its own run goes on."""
        if self._lock.locked() and self._owner != threading.get_ident():
            self._lock, self._owner = threading.Lock(), None
            self.was_cut_off = True


_all: weakref.WeakSet[Turns] = weakref.WeakSet()


def _renew_after_fork() -> None:
    for turns in list(_all):
        turns._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_after_fork)
