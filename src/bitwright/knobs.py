"""Every environment variable bitwright reads, in one place.

A knob is read at each use, so tests and users may change it while the process runs.
"""

import os
from dataclasses import dataclass

from bitwright.errors import BitwrightError


@dataclass(frozen=True)
class Knob:
    name: str
    default: str
    doc: str

    def get(self) -> str:
        return os.environ.get(self.name, self.default)

    def number(self) -> int:
        """The value as a nonnegative integer."""
        text = self.get().strip()
        if not (text.isascii() and text.isdigit()):
            raise BitwrightError(
                "environment variable is not a number",
                where=self.name,
                expected="digits",
                found=repr(text),
                hint=f"It means: {self.doc}. Unset it for the default, {self.default or 'none'}.",
            )
        return int(text)


DUMP = Knob("BITWRIGHT_DUMP", "", "folder that receives the graph as text after every pass")
FOLD_LIMIT = Knob(
    "BITWRIGHT_FOLD_LIMIT", str(1 << 20), "largest constant, in elements, that folding may create"
)
MAX_TENSOR_BYTES = Knob(
    "BITWRIGHT_MAX_TENSOR_BYTES",
    "",
    "largest single tensor a run may allocate; empty means the machine's memory",
)
CACHE = Knob(
    "BITWRIGHT_CACHE",
    "default",
    "folder of compiled models; `default` is the platform's cache folder, empty or `off` is none",
)
CACHE_BYTES = Knob(
    "BITWRIGHT_CACHE_BYTES",
    str(1 << 30),
    "size limit of the cache; above it, the least recently used entries are dropped",
)
COMPILERS = Knob(
    "BITWRIGHT_COMPILERS",
    "",
    "processes that compile in parallel on a cold start; empty means one per core, 1 only this one",
)
TAP_BYTES = Knob(
    "BITWRIGHT_TAP_BYTES",
    str(128 << 20),
    "bytes of observed values held at once; more need several runs of a batch",
)
WINOGRAD = Knob(
    "BITWRIGHT_WINOGRAD",
    "on",
    "`off` disables the Winograd algorithm: rounding errors are then smallest, and an infinity "
    "affects only the results whose window contains it",
)
TILES = Knob("BITWRIGHT_TILES", "on", "`off` disables AMX tiles")
TUNED = Knob(
    "BITWRIGHT_TUNED",
    "on",
    "`off` ignores what `bitwright tune-kernels` measured; results are the same bits",
)

GPU_TUNE = Knob(
    "BITWRIGHT_GPU_TUNE",
    "60",
    "seconds that a process may spend on measuring GPU kernels; what it finds is remembered",
)

TARGET = Knob(
    "BITWRIGHT_TARGET",
    "host",
    "processor to generate code for: `host`, or a smaller one by its name in `bitwright.target` "
    "(`avx2`, `sse2`, ...), to test a model for it",
)

ALL = tuple(value for value in list(globals().values()) if isinstance(value, Knob))


def max_tensor_bytes() -> int:
    """The largest allocation: the knob, else the machine's physical memory, else 8 GiB."""
    if MAX_TENSOR_BYTES.get():
        return MAX_TENSOR_BYTES.number()
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 8 << 30
