"""Emitted functions that wait for a word of memory to change: spin for a bounded time, then sleep.

    await(shared, word, value, turns)   returns when the word differs from the value
    wake(shared, word)                  wakes all threads that sleep on the word

A sleeping thread waits on a futex; on systems without futex it yields its core repeatedly. Each
word is followed by its number of sleepers, so that `wake` without sleepers needs no system call.
"""

from __future__ import annotations

from bitwright.backends.cpu.codegen.emit import Function, Module, Type, Value, i32, i64, ptr, void
from bitwright.backends.cpu.runtime.shared_block import FUTEX, PROCESSOR, SLEEPERS, SYSCALL, YIELD

_FUTEX_WAIT, _FUTEX_WAKE = 128, 129
_EVERYONE = 0x7FFFFFFF


def field(f: Function, shared: Value, offset: int, type_: Type) -> Value:
    """Load a field of the shared block."""
    return f.load(type_, f.offset(shared, offset))


def pause(f: Function) -> None:
    """Emit the processor's spin-loop hint."""
    if f.target.is_x86:
        f.intrinsic_void("llvm.x86.sse2.pause")
    elif f.target.architecture == "aarch64":
        f.intrinsic_void("llvm.aarch64.hint", f.const(i32, 1))


def emit_spin(module: Module) -> Function:
    """`spin`: wait for a change for a limited number of iterations."""
    params = (("word", ptr), ("value", i64), ("turns", i64))
    with module.function("spin", void, params) as f:
        word, value, limit = f.params
        with f.do_while(carry=(f.const(i64, 0),)) as loop:
            pause(f)
            turns = loop.carried[0] + 1
            same = f.eq(f.atomic_load(i64, word), value)
            loop.next(turns, again=f.and_(same, f.lt(turns, limit)))
    return f


def emit_sleep(module: Module) -> Function:
    """`sleep`: sleep while the word has the value; may return early."""
    params = (("shared", ptr), ("word", ptr), ("value", i64))
    with module.function("sleep", void, params) as f:
        shared, word, value = f.params
        syscall = field(f, shared, SYSCALL, ptr)
        with f.if_(f.ne(syscall, 0)) as branch:
            number = field(f, shared, FUTEX, i64)
            wait, nothing = f.const(i32, _FUTEX_WAIT), f.const(ptr, 0)
            low = f.convert(value, i32)  # a futex is 32 bits wide
            f.call_pointer(syscall, i64, number, word, wait, low, nothing, variadic_from=1)
        with branch.else_():
            yield_ = field(f, shared, YIELD, ptr)
            with f.if_(f.ne(yield_, 0)):
                f.call_pointer(yield_, i32)
    return f


def emit_await(module: Module, spin: Function, sleep: Function) -> Function:
    params = (("shared", ptr), ("word", ptr), ("value", i64), ("turns", i64))
    with module.function("await", void, params) as f:
        shared, word, value, turns = f.params
        f.call(spin, word, value, turns)
        with f.if_(f.eq(f.atomic_load(i64, word), value)):
            sleepers = f.offset(word, SLEEPERS)
            # incremented before the last check of the word, so that `wake` sees it
            f.atomic_add(sleepers, f.const(i32, 1))
            with f.do_while() as loop:
                with f.if_(f.eq(f.atomic_load(i64, word, "seq_cst"), value)):
                    f.call(sleep, shared, word, value)
                loop.next(again=f.eq(f.atomic_load(i64, word, "seq_cst"), value))
            f.atomic_add(sleepers, f.const(i32, -1))
    return f


def emit_wake(module: Module) -> Function:
    with module.function("wake", void, (("shared", ptr), ("word", ptr))) as f:
        shared, word = f.params
        sleepers = f.atomic_load(i32, f.offset(word, SLEEPERS), "seq_cst")
        syscall = field(f, shared, SYSCALL, ptr)
        with f.if_(f.and_(f.ne(sleepers, 0), f.ne(syscall, 0))):
            number = field(f, shared, FUTEX, i64)
            wake, everyone = f.const(i32, _FUTEX_WAKE), f.const(i32, _EVERYONE)
            f.call_pointer(syscall, i64, number, word, wake, everyone, variadic_from=1)
    return f


def emit_processor(module: Module) -> Function:
    """`processor`: the number of the current processor, or -1 if unknown."""
    with module.function("processor", i64, (("shared", ptr),)) as f:
        (shared,) = f.params
        function = field(f, shared, PROCESSOR, ptr)
        with f.if_(f.ne(function, 0), carry=(f.const(i64, -1),)) as branch:
            branch.next(f.convert(f.call_pointer(function, i32), i64))
        f.ret(branch.results[0])
    return f
