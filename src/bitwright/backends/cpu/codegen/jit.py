"""From text to machine code: LLVM makes object bytes, which are cached, loaded and called.

    library = load(module.text(), target)         # from the cache, or compiled and put there
    address = library.address("kernel")

`compilations()` counts the times LLVM really ran; until then it is not even loaded. Emitted code is
vectorized, unrolled, in SSA form and without repetitions as it comes (`codegen.emit.core`), so the code
generator takes it as it is: LLVM's passes would make no faster code of it, the standard pipeline in
seven times the time.
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


def _renew_after_fork() -> None:
    """In a child, a thread that is gone may have held a lock."""
    global _lock, _count_lock
    _lock, _count_lock = threading.RLock(), threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_after_fork)


def compilations() -> int:
    """How often LLVM's code generator has run for this process."""
    return _count


def count_compilation() -> None:
    global _count  # noqa: PLW0603
    with _count_lock:
        _count += 1


@cache
def _llvm() -> Any:
    """llvmlite's binding, which takes 0.1 s and 50 MB."""
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    return llvm


def _machine(target: Target, optimize: int = 2) -> Any:
    triple = target.triple
    if "windows" in triple:
        triple += "-elf"  # the loader reads ELF on every system
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
            hint="This is a fault of bitwright; please report it with the model.",
        ) from None
    inliner = llvm.create_new_module_pass_manager()
    inliner.add_always_inliner_pass()
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    inliner.run(module, llvm.create_pass_builder(machine, options))
    return module


def compile_object(text: str, target: Target) -> bytes:
    """Object code for the target, made now."""
    with _lock:
        machine = _machine(target)
        code = bytes(machine.emit_object(_parsed(text, machine)))
        count_compilation()
    return code


def compile_objects(texts: Sequence[str], target: Target) -> list[bytes]:
    """Object code of several modules, made now, by several processes where that is quicker."""
    from bitwright.backends.cpu.codegen.compilers import (  # a warm start needs it not
        kept_workers,
        submit,
    )

    with kept_workers():
        jobs = [submit(text, target) for text in texts]
        return [job.result() for job in jobs]


def assembly(text: str, target: Target) -> str:
    """What the compiled code looks like, for tests and for people."""
    with _lock:
        machine = _machine(target)
        return str(machine.emit_assembly(_parsed(text, machine)))


class _Engine:
    """LLVM's own loader, for what ours does not know."""

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
    """Machine code in memory; it stays there as long as this object lives."""

    def __init__(self, objects: Iterable[bytes], target: Target) -> None:
        if not target.runs_here():
            raise CompileError(f"code for {target} does not run on this machine")
        objects, self._code = list(objects), None
        if loader.is_available():
            with suppress(loader.LoaderRefusal):
                self._code = loader.Image(objects)
        self._code = self._code or _Engine(objects, target)

    def address(self, name: str) -> int:
        """Where a function starts."""
        found = self._code.address(name)
        if not found:
            raise CompileError(f"the library has no function {name!r}")
        return found


def load(text: str, target: Target, store: ObjectCache | None = None) -> Library:
    """The module ready to call: from the cache where it is there, else compiled."""
    return load_all([text], target, store)


def load_named(name: str, text: Callable[[], str], target: Target) -> Library:
    """A module that bitwright itself brings; its text is made only where the cache lacks it."""
    compiler = lambda text, target: compile_objects([text], target)[0]
    return Library([default_cache().get_named(name, text, target, compiler)], target)


def load_all(texts: Iterable[str], target: Target, store: ObjectCache | None = None) -> Library:
    """Several modules as one library; function names are unique across them."""
    return Library(compiled(texts, target, store), target)


def compiled(
    texts: Iterable[str], target: Target, store: ObjectCache | None = None
) -> tuple[bytes, ...]:
    """The object code of modules: from the cache where it is there, else made now."""
    store = store or default_cache()
    return store.get_all(list(texts), target, compile_objects)
