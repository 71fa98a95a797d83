"""Defer Ctrl-C to the end of a step, so that statistics contain whole batches.

The first interrupt is deferred; a second one takes effect at once.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interrupt_between_steps() -> Iterator[Callable[[], None]]:
    """Yields a function that raises KeyboardInterrupt if an interrupt is pending."""
    before = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not callable(before):  # this thread does not handle interrupts
        yield lambda: None
        return
    pending = threading.Event()

    def handle(number: int, frame: Any) -> None:
        if pending.is_set():
            before(number, frame)
        pending.set()

    def check() -> None:
        if pending.is_set():
            pending.clear()
            before(signal.SIGINT, None)

    signal.signal(signal.SIGINT, handle)
    try:
        yield check
        check()
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def saved_on_interrupt(save: Callable[[], str]) -> Iterator[None]:
    """Call `save` on an interrupt and add its message to the exception as a note.

    Other exceptions do not save, because the statistics may contain the fault.
    """
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if note := save():
            interrupt.add_note(note)
        raise
