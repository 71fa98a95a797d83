"""Loads kernel text as `triton.jit` functions. Identical text is loaded once.

`inspect.getsource`, which Triton calls, finds the text through `linecache`. The file name is made
from a digest of
the text, so Triton's own cache of compiled kernels finds a kernel again in the next process.

`interpreted()` says whether kernels run in Triton's interpreter on CPU tensors: TRITON_INTERPRET=1
in
the environment before Triton is imported.
"""

from __future__ import annotations

import hashlib
import linecache
import threading
from typing import Any

from bitwright.backends.gpu.codegen.interpreter import repair
from bitwright.backends.gpu.requirements import load_triton

_LOADED: dict[str, Any] = {}
_LOCK = threading.Lock()


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter."""
    return bool(load_triton().knobs.runtime.interpret)


def load_kernel(text: str) -> Any:
    """The function `kernel` of a module's text."""
    with _LOCK:
        if text not in _LOADED:
            _LOADED[text] = _load(text)
        return _LOADED[text]


def _load(text: str) -> Any:
    if interpreted():
        repair()
    digest = hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    name = f"<bitwright kernel {digest}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    module: dict[str, Any] = {"__name__": f"bitwright_kernel_{digest}", "__file__": name}
    exec(compile(text, name, "exec"), module)
    return module["kernel"]
