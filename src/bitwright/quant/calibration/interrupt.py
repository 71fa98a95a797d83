"""Ctrl-C between two steps of a run rather than inside one, so that what was counted is whole.

The first interrupt waits for the step to end; a second one does not.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interrupt_between_steps() -> Iterator[Callable[[], None]]:
    """A function that raises KeyboardInterrupt if one came since it was called last."""
    before = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not callable(before):  # nobody here handles interrupts
        yield lambda: None
        return
    came = threading.Event()

    def handle(number: int, frame: Any) -> None:
        if came.is_set():
            before(number, frame)
        came.set()

    def check() -> None:
        if came.is_set():
            came.clear()
            before(signal.SIGINT, None)

    signal.signal(signal.SIGINT, handle)
    try:
        yield check
        check()
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def saved_on_interrupt(save: Callable[[], str]) -> Iterator[None]:
    """An interrupt saves what there is first; what `save` says becomes a note of the exception.

    A run that fails saves nothing: what it would keep may hold the fault.
    """
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if note := save():
            interrupt.add_note(note)
        raise
