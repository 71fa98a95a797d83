"""Calls emitted kernels on numpy arrays, and inspects their assembly."""

import ctypes
import re

import numpy as np

from bitwright.backends.cpu.cache.objects import ObjectCache
from bitwright.backends.cpu.codegen import jit
from bitwright.backends.cpu.codegen.emit import Module, Signature, f32, storage_type
from bitwright.ir.dtype import dtype
from bitwright.target import NAMES, named

RUNNABLE = [name for name in ("host", *NAMES) if named(name).runs_here()]
WIDTHS = [name for name in ("host", "avx2", "sse2", "generic") if named(name).runs_here()][:3]
"""One target per vector width that this machine runs."""
_KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)


class Compiled:
    """A module in memory; call its kernels with arrays for pointers and numbers for the rest."""

    def __init__(self, module):
        self.module = module
        self.library = jit.load(module.text(), module.target, ObjectCache(None))

    def __call__(self, kernel="kernel", threads=1, **slots):
        values = {
            name: slot.ctypes.data if isinstance(slot, np.ndarray) else slot
            for name, slot in slots.items()
        }
        table = self.module.signatures[kernel].pack(**values)
        call = _KERNEL(self.library.address(kernel))
        for thread in range(threads):
            call(table.ctypes.data, thread, threads)


def lanewise(target, function, *operands, result=None, lanes=4):
    """function(f, *vectors) on arrays of numpy dtypes, `lanes` at a time."""
    names = [f"x{number}" for number in range(len(operands))]
    types = [element(array) for array in operands]
    module = Module(named(target) if isinstance(target, str) else target)
    with (
        module.kernel("kernel", Signature((*names, "y"), ("count",))) as f,
        f.loop(0, f.args.size("count"), lanes) as loop,
    ):
        values = [
            f.load(type_.vector(lanes), f.args.pointer(name), loop.index)
            for name, type_ in zip(names, types, strict=True)
        ]
        f.store(function(f, *values), f.args.pointer("y"), loop.index)
    count = operands[0].size
    room = -(-count // lanes) * lanes
    padded = [np.resize(array, room) for array in operands]
    y = np.zeros(room, result or operands[0].dtype)
    Compiled(module)(**dict(zip(names, padded, strict=True)), y=y, count=room)
    return y[:count]


def element(array):
    """The emitted type of an array's elements."""
    return storage_type(dtype(array.dtype))


def instructions(module):
    """The instructions of the module's assembly, one text each."""
    lines = (line.strip() for line in jit.assembly(module.text(), module.target).splitlines())
    return [re.sub(r"\s+", " ", line) for line in lines if line and line[0] not in ".#"]


def undefined_symbols(text, target):
    """External symbols of the object code."""
    compiled = jit.assembly(text, target)
    branches = r"^\s+(?:callq?|jmp|bl?|tail|j)\s+([A-Za-z_]\w*)"
    called = re.findall(branches, compiled, re.MULTILINE)
    defined = set(re.findall(r"^([A-Za-z_]\w*):", compiled, re.MULTILINE))
    return sorted(set(called) - defined)


def scale_kernel(target, name="kernel"):
    """y = 2 x, a minimal complete kernel."""
    module = Module(target)
    with module.kernel(name, Signature(("x", "y"), ("count",))) as f:
        x, y, lanes = f.args.pointer("x"), f.args.pointer("y"), f.target.lanes(32)

        def body(i, mask):
            f.store(f.load(f32.vector(lanes), x, i, mask=mask) * 2.0, y, i, mask=mask)

        f.vectors(*f.share(f.args.size("count"), lanes), lanes, body)
    return module
