"""The emitted runtime: a runner of step tables, the barrier between steps, and the worker's life.

    run(ptr steps, i64 count, i64 thread, i64 threads, ptr shared)

`steps` is a table of {kernel address, args address, flags}. Every thread calls every kernel in
order with its own number, and meets the others where the flags say so. New sizes rewrite tables;
nothing is compiled.

A thread that waits spins a bounded time, then sleeps in the kernel (futex) until it is woken; where
the system has no futex it keeps giving its core away instead. `shared_block` says where the words
lie that threads share; `native` loads what is emitted here.
"""

from __future__ import annotations

from bitwright.backends.cpu.emit import (
    SLOT_BYTES,
    Function,
    Module,
    Type,
    Value,
    i32,
    i64,
    ptr,
    void,
)
from bitwright.backends.cpu.shared_block import (
    ARRIVED,
    BARRIER_AFTER,
    COUNT,
    FUTEX,
    GENERATION,
    ROUND,
    SLEEPERS,
    SPINS,
    STEPS,
    STOP,
    SYSCALL,
    THREADS,
    YIELD,
)
from bitwright.target import Target

STEP_BYTES = 3 * SLOT_BYTES
_FUTEX_WAIT, _FUTEX_WAKE = 128, 129
_EVERYONE = 0x7FFFFFFF


def _field(f: Function, shared: Value, offset: int, type_: Type) -> Value:
    return f.load(type_, f.offset(shared, offset))


def _pause(f: Function) -> None:
    """Tell the core that this is a waiting loop."""
    if f.target.is_x86:
        f.intrinsic_void("llvm.x86.sse2.pause")
    elif f.target.architecture == "aarch64":
        f.intrinsic_void("llvm.aarch64.hint", f.const(i32, 1))


def _emit_sleep(module: Module) -> Function:
    """Sleep while the word has the value; may return early."""
    params = (("shared", ptr), ("word", ptr), ("value", i32))
    with module.function("sleep", void, params) as f:
        shared, word, value = f.params
        syscall = _field(f, shared, SYSCALL, ptr)
        with f.if_(f.ne(syscall, 0)) as branch:
            number = _field(f, shared, FUTEX, i64)
            wait, nothing = f.const(i32, _FUTEX_WAIT), f.const(ptr, 0)
            f.call_pointer(syscall, i64, number, word, wait, value, nothing, variadic_from=1)
        with branch.else_():
            give_away = _field(f, shared, YIELD, ptr)
            with f.if_(f.ne(give_away, 0)):
                f.call_pointer(give_away, i32)
    return f


def _emit_wake(module: Module) -> Function:
    """Wake whoever sleeps on the word, if anybody sleeps at all."""
    with module.function("wake", void, (("shared", ptr), ("word", ptr))) as f:
        shared, word = f.params
        sleepers = f.atomic_load(i32, f.offset(shared, SLEEPERS), "seq_cst")
        syscall = _field(f, shared, SYSCALL, ptr)
        with f.if_(f.and_(f.ne(sleepers, 0), f.ne(syscall, 0))):
            number = _field(f, shared, FUTEX, i64)
            wake, everyone = f.const(i32, _FUTEX_WAKE), f.const(i32, _EVERYONE)
            f.call_pointer(syscall, i64, number, word, wake, everyone, variadic_from=1)
    return f


def _emit_await(module: Module, sleep: Function) -> Function:
    """Return once the word differs from the value: spin, then sleep."""
    params = (("shared", ptr), ("word", ptr), ("value", i32))
    with module.function("await", void, params) as f:
        shared, word, value = f.params
        limit = _field(f, shared, SPINS, i64)
        with f.do_while(carry=(f.const(i64, 0),)) as loop:
            _pause(f)
            turns = loop.carried[0] + 1
            same = f.eq(f.atomic_load(i32, word), value)
            loop.next(turns, again=f.and_(same, f.lt(turns, limit)))
        with f.if_(f.eq(f.atomic_load(i32, word), value)):
            sleepers = f.offset(shared, SLEEPERS)
            # counted before the last look at the word: who changes it then sees the count
            f.atomic_add(sleepers, f.const(i32, 1))
            with f.do_while() as loop:
                with f.if_(f.eq(f.atomic_load(i32, word, "seq_cst"), value)):
                    f.call(sleep, shared, word, value)
                loop.next(again=f.eq(f.atomic_load(i32, word, "seq_cst"), value))
            f.atomic_add(sleepers, f.const(i32, -1))
    return f


def _emit_barrier(module: Module, await_: Function, wake: Function) -> Function:
    """The last thread to arrive opens the barrier for all."""
    params = (("shared", ptr), ("threads", i64))
    with module.function("barrier", void, params) as f:
        shared, threads = f.params
        with f.if_(f.gt(threads, 1)):
            arrived, word = f.offset(shared, ARRIVED), f.offset(shared, GENERATION)
            generation = f.atomic_load(i32, word)
            before = f.atomic_add(arrived, f.const(i32, 1))
            last = f.eq(f.convert(before, i64), threads - 1)
            with f.if_(last) as branch:
                f.atomic_store(f.const(i32, 0), arrived, "monotonic")
                f.atomic_store(generation + 1, word, "seq_cst")
                f.call(wake, shared, word)
            with branch.else_():
                f.call(await_, shared, word, generation)
    return f


def _emit_run(module: Module, barrier: Function) -> Function:
    params = (("steps", ptr), ("count", i64), ("thread", i64), ("threads", i64), ("shared", ptr))
    with module.function("run", void, params, internal=False) as f:
        steps, count, thread, threads, shared = f.params
        with f.loop(0, count) as loop:
            step = f.offset(steps, loop.index * STEP_BYTES)
            kernel, args, flags = (
                f.load(type_, f.offset(step, position * SLOT_BYTES))
                for position, type_ in enumerate((ptr, ptr, i64))
            )
            f.call_pointer(kernel, void, args, thread, threads)
            with f.if_(f.ne(f.and_(flags, BARRIER_AFTER), 0)):
                f.call(barrier, shared, threads)
    return f


def _emit_take_part(module: Module, run: Function, barrier: Function) -> Function:
    """One thread's part in the run that the shared block describes, up to the common end."""
    with module.function(
        "take_part", void, (("shared", ptr), ("thread", i64)), internal=False
    ) as f:
        shared, thread = f.params
        threads = _field(f, shared, THREADS, i64)
        steps, count = _field(f, shared, STEPS, ptr), _field(f, shared, COUNT, i64)
        f.call(run, steps, count, thread, threads, shared)
        f.call(barrier, shared, threads)
    return f


def _emit_work(module: Module, await_: Function, take_part: Function) -> None:
    """A worker's life: wait for a round, take part, again; until told to stop."""
    with module.function("work", void, (("shared", ptr), ("thread", i64)), internal=False) as f:
        shared, thread = f.params
        word = f.offset(shared, ROUND)
        with f.do_while(carry=(f.const(i32, 0),)) as loop:
            f.call(await_, shared, word, loop.carried[0])
            current = f.atomic_load(i32, word)
            goes_on = f.eq(_field(f, shared, STOP, i64), 0)
            with f.if_(goes_on):
                f.call(take_part, shared, thread)
            loop.next(current, again=goes_on)


def _emit_start(module: Module, wake: Function, take_part: Function) -> None:
    """The caller's side: publish a run, wake the workers, take part as thread 0."""
    params = (("shared", ptr), ("steps", ptr), ("count", i64))
    with module.function("start", void, params, internal=False) as f:
        shared, steps, count = f.params
        f.store(steps, f.offset(shared, STEPS))
        f.store(count, f.offset(shared, COUNT))
        word = f.offset(shared, ROUND)
        f.atomic_add(word, f.const(i32, 1))
        f.call(wake, shared, word)
        f.call(take_part, shared, 0)


def _emit_stop(module: Module, wake: Function) -> None:
    """End every worker's life."""
    with module.function("stop", void, (("shared", ptr),), internal=False) as f:
        (shared,) = f.params
        f.store(f.const(i64, 1), f.offset(shared, STOP))
        word = f.offset(shared, ROUND)
        f.atomic_add(word, f.const(i32, 1))
        f.call(wake, shared, word)


def _emit_idle(module: Module) -> None:
    """Spin `turns` times at nothing, to learn how long a turn takes."""
    params = (("shared", ptr), ("turns", i64))
    with module.function("idle", void, params, internal=False) as f:
        shared, turns = f.params
        with f.do_while(carry=(f.const(i64, 0),)) as loop:
            _pause(f)
            done = loop.carried[0] + 1
            same = f.ne(f.atomic_load(i32, f.offset(shared, ROUND)), -1)
            loop.next(done, again=f.and_(same, f.lt(done, turns)))


def runtime_text(target: Target) -> str:
    """The runtime as a module for the target."""
    module = Module(target, "runtime")
    sleep, wake = _emit_sleep(module), _emit_wake(module)
    await_ = _emit_await(module, sleep)
    barrier = _emit_barrier(module, await_, wake)
    run = _emit_run(module, barrier)
    take_part = _emit_take_part(module, run, barrier)
    _emit_work(module, await_, take_part)
    _emit_start(module, wake, take_part)
    _emit_stop(module, wake)
    _emit_idle(module)
    return module.text()
