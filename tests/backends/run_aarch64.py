"""Runs kernels made for AArch64 in an emulator: a program of them and their data, linked here.

A schedule's kernels, with every buffer at a fixed address, become one static ELF file whose start
calls each kernel for each thread in turn and writes one buffer to its output. No linker is needed:
the few kinds of relocation that emitted code has are applied here.
"""

import shutil
import struct
import subprocess

import numpy as np
from run_kernel import lower

from bitwright.backends.cpu.codegen import jit
from bitwright.ir.dim import evaluate
from bitwright.lir.buffer import Storage
from bitwright.lir.plan import byte_size
from bitwright.ops.core.interpret import bind_input

EMULATOR = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
CODE, DATA = 0x400000, 0x10000000
_WRITE, _EXIT = 64, 93
_PAGE_HI21, _ADD_LO12, _JUMP26, _CALL26 = 275, 277, 282, 283
_LOADS = {278: 0, 284: 1, 285: 2, 286: 3, 299: 4}
"""Relocations of loads and stores: log2 of the access size."""


class Image:
    """Concatenated object files, and the addresses of their functions."""

    def __init__(self):
        self.code = bytearray()
        self.symbols = {}

    def add(self, data):
        sections = self._sections(data)
        places = {}
        for number, (_, kind, flags, _, offset, size, _, _, align, _) in enumerate(sections):
            if flags & 2:
                self.code += bytes(-len(self.code) % max(align, 16))
                places[number] = CODE + len(self.code)
                self.code += data[offset : offset + size] if kind != 8 else bytes(size)
        (table,) = [s for s in sections if s[1] == 2]
        names = sections[table[6]][4]
        symbols = []
        for at in range(table[4], table[4] + table[5], 24):
            name, info, _, section, value, _ = struct.unpack_from("<IBBHQQ", data, at)
            address = places.get(section, 0) + value
            symbols.append(address)
            if info >> 4 == 1 and section:
                text = data[names + name : data.index(b"\0", names + name)]
                self.symbols[text.decode()] = address
        for section in sections:
            if section[1] == 4 and section[7] in places:
                for at in range(section[4], section[4] + section[5], 24):
                    offset, info, addend = struct.unpack_from("<QQq", data, at)
                    place = places[section[7]] + offset
                    self._apply(info & 0xFFFFFFFF, place, symbols[info >> 32] + addend)

    @staticmethod
    def _sections(data):
        start, count = struct.unpack_from("<Q", data, 40)[0], struct.unpack_from("<H", data, 60)[0]
        return [struct.unpack_from("<IIQQQQIIQQ", data, start + 64 * n) for n in range(count)]

    def _apply(self, kind, place, target):
        at = place - CODE
        (word,) = struct.unpack_from("<I", self.code, at)
        if kind in (_JUMP26, _CALL26):
            word |= (target - place) >> 2 & 0x3FFFFFF
        elif kind == _PAGE_HI21:
            pages = (target >> 12) - (place >> 12)
            word |= (pages & 3) << 29 | (pages >> 2 & 0x7FFFF) << 5
        elif kind == _ADD_LO12 or kind in _LOADS:
            word |= ((target & 0xFFF) >> _LOADS.get(kind, 0)) << 10
        else:
            raise AssertionError(f"relocation {kind} is not known")
        struct.pack_into("<I", self.code, at, word)


def moved(register, value):
    """Instructions that load a constant into a register: movz, then movk."""
    words = [0xD2800000 | (value & 0xFFFF) << 5 | register]
    for part in range(1, 4):
        words.append(0xF2800000 | part << 21 | (value >> 16 * part & 0xFFFF) << 5 | register)
    return words


def start_code(calls, output, size):
    """The entry point: calls every kernel for every thread, writes the output, exits."""
    words = []
    for code, *operands in calls:
        for register, value in enumerate(operands):
            words += moved(register, value)
        words += [*moved(16, code), 0xD63F0000 | 16 << 5]  # blr x16
    for number, operands in ((_WRITE, (1, output, size)), (_EXIT, (0,))):
        for register, value in enumerate(operands):
            words += moved(register, value)
        words += [*moved(8, number), 0xD4000001]  # svc #0
    return struct.pack(f"<{len(words)}I", *words)


def run(graph, feeds, target, threads):
    """The graph's one output, computed by the emulated kernels."""
    ctx = lower(graph, target)
    image, bindings = Image(), {}
    for value in graph.inputs:
        bind_input(value, feeds[value.name], bindings)
    for kernel in ctx.kernels.values():
        image.add(jit.compile_object(ctx.text(kernel), target))
    data, places = bytearray(), {}

    def room(content):
        data.extend(bytes(-len(data) % 64))
        data.extend(content)
        return DATA + len(data) - len(content)

    for buffer in ctx.schedule.buffers:
        if buffer.storage is Storage.CONSTANT:
            content = buffer.array.tobytes()
        elif buffer.storage is Storage.INPUT:
            content = np.ascontiguousarray(feeds[buffer.name]).tobytes()
        else:
            content = bytes(byte_size(buffer, bindings))
        places[buffer] = room(content)

    def address(view):
        return places[view.buffer] + evaluate(view.offset, bindings) * view.dtype.numpy.itemsize

    calls = []
    for step in ctx.schedule.steps:
        kernel = ctx.kernels[step.kernel]
        slots = {name: address(view) for name, view in step.pointers.items()}
        slots |= {name: evaluate(size, bindings) for name, size in step.sizes.items()}
        table = room(kernel.signature.pack(**slots).tobytes())
        code = image.symbols[kernel.name]
        calls += [(code, table, thread, threads) for thread in range(threads)]
    (view,) = ctx.schedule.outputs.values()
    shape = [evaluate(size, bindings) for size in view.shape]
    size = int(np.prod(shape)) * view.dtype.numpy.itemsize
    image.code += bytes(-len(image.code) % 16)
    image.symbols["_start"] = CODE + len(image.code)
    image.code += start_code(calls, address(view), size)
    return image, bytes(data), (view.dtype.numpy, shape)


def executable(image, data):
    """A static ELF file of code and data."""
    offset = 0x1000
    code = bytes(image.code)
    behind = offset + len(code) + (-len(code)) % 0x1000
    header = struct.pack(
        "<16sHHIQQQIHHHHHH",
        b"\x7fELF\x02\x01\x01",
        *(2, 183, 1, image.symbols["_start"], 64, 0, 0, 64, 56, 2, 0, 0, 0),
    )
    for flags, at, place, size in ((5, offset, CODE, len(code)), (6, behind, DATA, len(data))):
        header += struct.pack("<IIQQQQQQ", 1, flags, at, place, place, size, size, 0x1000)
    return header.ljust(offset, b"\0") + code.ljust(behind - offset, b"\0") + data


def emulate(graph, feeds, target, threads, folder):
    image, data, (element, shape) = run(graph, feeds, target, threads)
    path = folder / "program"
    path.write_bytes(executable(image, data))
    path.chmod(0o755)
    command = [EMULATOR, "-cpu", "max", path]
    done = subprocess.run(command, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return np.frombuffer(done.stdout, element).reshape(shape)
