"""Compilation of LLVM text to object code, and loading it.

    library = load(module.text(), target)         # from the cache, or compiled and stored
    address = library.address("kernel")

`compilations()` counts runs of LLVM's code generator; the first one imports llvmlite. Emitted code
is already vectorized, unrolled and in SSA form without common subexpressions
(`codegen.emit.core`), so it goes to the code generator directly: LLVM's standard pipeline takes
seven times as long and makes it no faster.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from bitwright.backends.cpu.cache.objects import ObjectCache, default_cache
from bitwright.backends.cpu.codegen import loader
from bitwright.errors import CompileError
from bitwright.target import Target

_lock = threading.RLock()
_count = 0
_count_lock = threading.Lock()


def _reset_locks_after_fork() -> None:
    """Replace the locks in a forked child: a thread that no longer exists may hold them."""
    global _lock, _count_lock
    _lock, _count_lock = threading.RLock(), threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_locks_after_fork)


def compilations() -> int:
    """How often LLVM's code generator ran for this process."""
    return _count


def count_compilation() -> None:
    global _count  # noqa: PLW0603
    with _count_lock:
        _count += 1


@cache
def _llvm() -> Any:
    """llvmlite's binding, imported on demand: it takes 0.1 s and 50 MB."""
    import llvmlite.binding as llvm  # type: ignore[import-untyped]

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    return llvm


def _machine(target: Target, optimize: int = 2) -> Any:
    triple = target.triple
    if "windows" in triple:
        triple += "-elf"  # the loader reads ELF on every platform
    try:
        return (
            _llvm()
            .Target.from_triple(triple)
            .create_target_machine(
                cpu=target.cpu,
                features=target.llvm_features,
                opt=optimize,
                reloc="pic",
                codemodel="small",
                abiname=target.abi,
            )
        )
    except RuntimeError as error:
        raise CompileError(f"LLVM does not know this target: {error}", found=target) from None


def _parsed(text: str, machine: Any) -> Any:
    llvm = _llvm()
    try:
        module = llvm.parse_assembly(text)
        module.triple = machine.triple
        module.data_layout = str(machine.target_data)
        module.verify()
    except RuntimeError as error:
        raise CompileError(
            f"LLVM refuses the emitted code: {error}",
            hint="This is a bug in bitwright; please report it with the model.",
        ) from None
    inliner = llvm.create_new_module_pass_manager()
    inliner.add_always_inliner_pass()
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    inliner.run(module, llvm.create_pass_builder(machine, options))
    return module


def compile_object(text: str, target: Target) -> bytes:
    """Object code for the target, compiled in this process."""
    with _lock:
        machine = _machine(target)
        code = bytes(machine.emit_object(_parsed(text, machine)))
        count_compilation()
    return code


def compile_objects(texts: Sequence[str], target: Target) -> list[bytes]:
    """Object code of several modules, compiled by worker processes where that is faster."""
    from bitwright.backends.cpu.codegen.compilers import (  # not needed on a warm start
        hold_workers,
        submit,
    )

    with hold_workers():
        jobs = [submit(text, target) for text in texts]
        return [job.result() for job in jobs]


def assembly(text: str, target: Target) -> str:
    """The assembly of the compiled code, for tests and inspection."""
    with _lock:
        machine = _machine(target)
        return str(machine.emit_assembly(_parsed(text, machine)))


class _Engine:
    """LLVM's loader, the fallback for objects that `loader` does not support."""

    def __init__(self, objects: Iterable[bytes], target: Target) -> None:
        llvm = _llvm()
        with _lock:
            self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine(target))
            for code in objects:
                self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
            self._engine.finalize_object()

    def address(self, name: str) -> int:
        with _lock:
            return int(self._engine.get_function_address(name))


class Library:
    """Machine code in memory, released with this object."""

    def __init__(self, objects: Iterable[bytes], target: Target) -> None:
        if not target.runs_here():
            raise CompileError(f"code for {target} does not run on this machine")
        self._code = _loaded(list(objects), target)

    def address(self, name: str) -> int:
        """The address of a function."""
        found = self._code.address(name)
        if not found:
            raise CompileError(f"the library has no function {name!r}")
        return found


def _loaded(objects: list[bytes], target: Target) -> loader.Image | _Engine:
    if loader.is_available():
        with suppress(loader.LoaderRefusal):
            return loader.Image(objects)
    return _Engine(objects, target)


def load(text: str, target: Target, store: ObjectCache | None = None) -> Library:
    """The module as a library: from the cache, else compiled."""
    return load_all([text], target, store)


def load_named(name: str, text: Callable[[], str], target: Target) -> Library:
    """A built-in module of bitwright; its text is emitted only on a cache miss."""
    compiler = lambda text, target: compile_objects([text], target)[0]
    return Library([default_cache().get_named(name, text, target, compiler)], target)


def load_all(texts: Iterable[str], target: Target, store: ObjectCache | None = None) -> Library:
    """Several modules as one library; function names must be unique across them."""
    return Library(compiled(texts, target, store), target)


def compiled(
    texts: Iterable[str], target: Target, store: ObjectCache | None = None
) -> tuple[bytes, ...]:
    """The object code of modules: from the cache, else compiled now."""
    store = store or default_cache()
    return store.get_all(list(texts), target, compile_objects)
