"""One capture of a CUDA graph at a time: torch fails when one thread empties its cache of device
memory, as the begin of every capture does, while another thread captures."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bitwright.backends.gpu.requirements import load_torch

CAPTURE = threading.RLock()


@contextmanager
def captured(stream: Any = None) -> Iterator[Any]:
    """A graph of the launches inside, on a stream of its own or the given one."""
    torch = load_torch()
    graph = torch.cuda.CUDAGraph()
    with CAPTURE, torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        yield graph


def empty_cache() -> None:
    """Give the memory that torch keeps back to the device."""
    with CAPTURE:
        load_torch().cuda.empty_cache()
