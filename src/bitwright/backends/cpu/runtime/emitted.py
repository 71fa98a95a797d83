"""The emitted runtime: distributes step tables over threads.

`steps` is a table of {kernel address, args address, flags}. A phase is a sequence of independent
steps that ends with one marked `BARRIER_AFTER`. It has one part per thread (or a single part if its
steps are too small to distribute); part p calls every kernel of the phase as thread p. The next
phase begins when all parts are done.

Each thread first claims the part of its own number, whose data is likely in its cache. A thread
without work then claims parts that are still free, after a short wait; a thread that sleeps or was
preempted therefore does not delay the others. Results do not depend on which thread runs a part.

The generation is 4 · (number of phases so far) + state; the states are closed, shared phase and
single-part phase. Claims store generations: a part is free while its claim is below the generation,
and a successful claim prevents the phase, the run and its table from ending. `native` loads this
code.
"""

from __future__ import annotations

from bitwright.backends.cpu.codegen.emit import (
    SLOT_BYTES,
    Function,
    Module,
    Value,
    i1,
    i64,
    ptr,
    void,
)
from bitwright.backends.cpu.runtime import shared_block as block
from bitwright.backends.cpu.runtime import waiting
from bitwright.backends.cpu.runtime.waiting import field
from bitwright.target import Target

STEP_BYTES = 3 * SLOT_BYTES
_STATE_BITS = 2
_STATE = (1 << _STATE_BITS) - 1
_CLOSED, _SHARED, _SINGLE = 0, 1, 2


def _step(f: Function, steps: Value, number: Value) -> tuple[Value, Value, Value]:
    """The kernel, its args and the flags of a step."""
    step = f.offset(steps, number * STEP_BYTES)
    kernel, args, flags = (
        f.load(type_, f.offset(step, position * SLOT_BYTES))
        for position, type_ in enumerate((ptr, ptr, i64))
    )
    return kernel, args, flags


def _is_set(f: Function, flags: Value, flag: int) -> Value:
    return f.ne(f.and_(flags, flag), 0)


def _emit_run(module: Module) -> None:
    """`run`: one thread runs all steps."""
    with module.function("run", void, (("steps", ptr), ("count", i64)), internal=False) as f:
        steps, count = f.params
        with f.loop(0, count) as loop:
            kernel, args, _ = _step(f, steps, loop.index)
            f.call_pointer(kernel, void, args, f.const(i64, 0), f.const(i64, 1))


def _emit_state(module: Module) -> Function:
    """`state`: the state of a generation whose phase begins at step `number`."""
    params = (("shared", ptr), ("number", i64))
    with module.function("state", i64, params) as f:
        shared, number = f.params
        steps = field(f, shared, block.STEPS, ptr)
        ended = f.ge(number, field(f, shared, block.COUNT, i64))
        with f.if_(f.not_(ended), carry=(f.const(i64, _CLOSED),)) as branch:
            flags = _step(f, steps, number)[2]
            branch.next(f.select(_is_set(f, flags, block.ALONE), f.const(i64, _SINGLE), _SHARED))
        f.ret(branch.results[0])
    return f


def _emit_claim(module: Module) -> Function:
    """`claim`: claim a part of the phase if it is free."""
    params = (("shared", ptr), ("part", i64), ("generation", i64))
    with module.function("claim", i1, params) as f:
        shared, part, generation = f.params
        word = f.offset(shared, block.CLAIMS + part * block.LINE)
        last = f.atomic_load(i64, word)
        with f.if_(f.ult(last, generation), carry=(f.const(i1, 0),)) as branch:
            branch.next(f.compare_exchange(word, last, generation))
        f.ret(branch.results[0])
    return f


def _emit_perform(module: Module, state: Function, wake: Function) -> Function:
    """`perform`: run a claimed part; the thread that finishes the last one opens the next phase."""
    params = (("shared", ptr), ("part", i64), ("parts", i64), ("generation", i64))
    with module.function("perform", void, params) as f:
        shared, part, parts, generation = f.params
        steps, count, cursor = (
            field(f, shared, at, type_)
            for at, type_ in ((block.STEPS, ptr), (block.COUNT, i64), (block.CURSOR, i64))
        )
        with f.do_while(carry=(cursor,)) as loop:
            kernel, args, flags = _step(f, steps, loop.carried[0])
            f.call_pointer(kernel, void, args, part, parts)
            after = loop.carried[0] + 1
            goes_on = f.and_(f.lt(after, count), f.not_(_is_set(f, flags, block.BARRIER_AFTER)))
            loop.next(after, again=goes_on)
        done = f.offset(shared, block.DONE)
        with f.if_(f.eq(f.atomic_add(done, f.const(i64, 1)) + 1, parts)):
            (following,) = loop.results
            f.atomic_store(f.const(i64, 0), done, "monotonic")
            f.store(following, f.offset(shared, block.CURSOR))
            phase = f.lshr(generation, _STATE_BITS) + 1
            opened = f.shl(phase, _STATE_BITS) + f.call(state, shared, following)
            word = f.offset(shared, block.GENERATION)
            f.atomic_store(opened, word, "seq_cst")
            f.call(wake, shared, word)
    return f


def _emit_steal_or_wait(
    module: Module, spin: Function, await_: Function, claim: Function, perform: Function
) -> Function:
    """`steal_or_wait`: wait for the next phase, or run parts that are still free."""
    params = (("shared", ptr), ("parts", i64), ("generation", i64))
    with module.function("steal_or_wait", void, params) as f:
        shared, parts, generation = f.params
        word = f.offset(shared, block.GENERATION)
        f.call(spin, word, generation, field(f, shared, block.STEAL_SPINS, i64))
        with f.if_(f.eq(f.atomic_load(i64, word), generation)):
            with f.loop(0, parts) as loop, f.if_(f.call(claim, shared, loop.index, generation)):
                f.call(perform, shared, loop.index, parts, generation)
            f.call(spin, word, generation, field(f, shared, block.SPINS, i64))
            with f.if_(f.eq(f.atomic_load(i64, word), generation)):
                f.atomic_add(f.offset(shared, block.SLEEPS), f.const(i64, 1), "monotonic")
                f.call(await_, shared, word, generation, f.const(i64, 1))
    return f


def _emit_take_part(
    module: Module, claim: Function, perform: Function, steal_or_wait: Function
) -> Function:
    """`take_part`: the work of one thread in a run, until the run ends."""
    params = (("shared", ptr), ("thread", i64))
    with module.function("take_part", void, params, internal=False) as f:
        shared, thread = f.params
        threads = field(f, shared, block.THREADS, i64)
        word = f.offset(shared, block.GENERATION)
        with f.do_while() as loop:
            generation = f.atomic_load(i64, word)
            state = f.and_(generation, _STATE)
            runs = f.ne(state, _CLOSED)
            with f.if_(runs):
                parts = f.select(f.eq(state, _SINGLE), f.const(i64, 1), threads)
                with f.if_(f.lt(thread, parts), carry=(f.const(i1, 0),)) as branch:
                    branch.next(f.call(claim, shared, thread, generation))
                with f.if_(branch.results[0]) as claimed:
                    f.call(perform, shared, thread, parts, generation)
                with claimed.else_():
                    f.call(steal_or_wait, shared, parts, generation)
            loop.next(again=runs)
    return f


def _emit_work(module: Module, await_: Function, processor: Function, take_part: Function) -> None:
    """`work`: the loop of a worker: take part in a run, then wait for the next, until `STOP`."""
    with module.function("work", void, (("shared", ptr), ("thread", i64)), internal=False) as f:
        shared, thread = f.params
        word = f.offset(shared, block.ROUND)
        with f.do_while() as loop:
            current = f.atomic_load(i64, word)
            goes_on = f.eq(field(f, shared, block.STOP, i64), 0)
            with f.if_(goes_on):
                excluded = f.offset(shared, block.EXCLUDED + thread * block.LINE)
                takes_part = f.eq(f.load(i64, excluded), 0)
                with f.if_(takes_part):
                    here, caller = f.call(processor, shared), field(f, shared, block.CALLER, i64)
                    with f.if_(f.and_(f.ge(here, 0), f.eq(here, caller))):
                        collided = f.offset(shared, block.COLLIDED)
                        f.atomic_store(f.const(i64, 1), collided, "monotonic")
                    f.call(take_part, shared, thread)
                turns = f.select(takes_part, field(f, shared, block.IDLE_SPINS, i64), 1)
                f.call(await_, shared, word, current, turns)
            loop.next(again=goes_on)


def _emit_start(
    module: Module, state: Function, wake: Function, processor: Function, take_part: Function
) -> None:
    """`start`: publish a run, wake the workers, take part as thread 0.

    Returns the caller's processor if a worker ran on it too, else -1.
    """
    params = (("shared", ptr), ("steps", ptr), ("count", i64))
    with module.function("start", i64, params, internal=False) as f:
        shared, steps, count = f.params
        here = f.call(processor, shared)
        for value, at in (
            (steps, block.STEPS),
            (count, block.COUNT),
            (f.const(i64, 0), block.CURSOR),
            (here, block.CALLER),
        ):
            f.store(value, f.offset(shared, at))
        generation = f.offset(shared, block.GENERATION)
        closed = f.atomic_load(i64, generation)
        f.atomic_store(closed + f.call(state, shared, 0), generation)
        word = f.offset(shared, block.ROUND)
        f.atomic_add(word, f.const(i64, 1))
        with f.if_(f.ne(field(f, shared, block.ACTIVE, i64), 0)):
            f.call(wake, shared, word)
        f.call(take_part, shared, 0)
        collided = f.offset(shared, block.COLLIDED)
        has_collided = f.ne(f.atomic_load(i64, collided), 0)
        f.atomic_store(f.const(i64, 0), collided)
        f.ret(f.select(has_collided, here, -1))


def _emit_stop(module: Module, wake: Function) -> None:
    """`stop`: end all workers."""
    with module.function("stop", void, (("shared", ptr),), internal=False) as f:
        (shared,) = f.params
        f.store(f.const(i64, 1), f.offset(shared, block.STOP))
        word = f.offset(shared, block.ROUND)
        f.atomic_add(word, f.const(i64, 1))
        f.call(wake, shared, word)


def _emit_measured(module: Module, spin: Function) -> None:
    """`idle` and `nothing`: a spin loop and an empty kernel, to measure their cost."""
    params = (("shared", ptr), ("turns", i64))
    with module.function("idle", void, params, internal=False) as f:
        shared, turns = f.params
        f.call(spin, f.offset(shared, block.ROUND), 0, turns)
    kernel_params = (("args", ptr), ("thread", i64), ("threads", i64))
    with module.function("nothing", void, kernel_params, internal=False):
        pass


def runtime_text(target: Target) -> str:
    """The LLVM IR of the runtime for the target."""
    module = Module(target, "runtime")
    spin, sleep = waiting.emit_spin(module), waiting.emit_sleep(module)
    await_, wake = waiting.emit_await(module, spin, sleep), waiting.emit_wake(module)
    processor = waiting.emit_processor(module)
    state, claim = _emit_state(module), _emit_claim(module)
    perform = _emit_perform(module, state, wake)
    steal_or_wait = _emit_steal_or_wait(module, spin, await_, claim, perform)
    take_part = _emit_take_part(module, claim, perform, steal_or_wait)
    _emit_work(module, await_, processor, take_part)
    _emit_start(module, state, wake, processor, take_part)
    _emit_stop(module, wake)
    _emit_run(module)
    _emit_measured(module, spin)
    return module.text()
