"""Kernels by name: a warm start writes no text, and an entry that is wrong is made again."""

import json
from dataclasses import replace

import numpy as np
import pytest
from run_kernel import graph_of

from bitwright import system
from bitwright.backends.cpu.backend import CpuBackend
from bitwright.backends.cpu.cache import kernel_store
from bitwright.backends.cpu.cache.kernel_store import KernelStore
from bitwright.backends.cpu.codegen import jit
from bitwright.backends.cpu.codegen.emit import Module
from bitwright.backends.cpu.lowering.build import build
from bitwright.backends.cpu.lowering.context import Lowering
from bitwright.target import host, named

X = np.linspace(-2, 2, 77, dtype=np.float32).reshape(7, 11)


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("BITWRIGHT_CACHE", str(tmp_path))
    return tmp_path / "objects"


@pytest.fixture
def emitted(monkeypatch):
    """The names of the kernels whose text was written for the store."""
    names, make = [], KernelStore.make
    monkeypatch.setattr(
        KernelStore, "make", lambda self, name, *rest: names.append(name) or make(self, name, *rest)
    )
    return names


def softmax():
    """The result of a program that is gone at once, so that only the cache remembers it."""
    graph = graph_of("softmax", X, axis=-1)
    return CpuBackend(host()).compile(graph, 1).run({"in0": X})["out0"]


def test_what_the_cache_holds_is_neither_written_nor_compiled(emitted):
    expected = softmax()
    assert len(emitted) == 1
    compiled = jit.compilations()
    np.testing.assert_array_equal(softmax(), expected)
    assert len(emitted) == 1 and jit.compilations() == compiled


def test_an_empty_cache_is_known_as_such():
    assert not KernelStore(host()).is_used
    softmax()
    assert KernelStore(host()).is_used and not KernelStore(replace(host(), l2_bytes=1)).is_used


def test_kernels_of_programs_that_exist_need_no_cache(emitted, monkeypatch):
    monkeypatch.setenv("BITWRIGHT_CACHE", "off")
    first = build(graph_of("softmax", X, axis=-1), host())
    second = build(graph_of("softmax", X[1:], axis=-1), host())
    assert len(emitted) == 1 and first.objects[0] is second.objects[0]


DAMAGES = [lambda data: b"", lambda data: data[:-1], lambda data: data[:-2] + b"xx"]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", ["name", "code", "both"])
def test_damaged_entries_are_made_again(folder, emitted, damage, kind):
    expected = softmax()
    kinds = {b'"slots"': "name", b"ELF": "code"}
    files = [(path, path.read_bytes()) for path in folder.iterdir()]
    found = {name: (p, data) for word, name in kinds.items() for p, data in files if word in data}
    for path, data in found.values() if kind == "both" else [found[kind]]:
        path.write_bytes(damage(data))
    compiled = jit.compilations()
    np.testing.assert_array_equal(softmax(), expected)
    assert len(emitted) == 2
    assert jit.compilations() == compiled + (kind != "name")
    np.testing.assert_array_equal(softmax(), expected)
    assert len(emitted) == 2


@pytest.mark.parametrize("facts", [b"[]", b"null", b"{", b"\xff"])
def test_an_entry_that_says_nothing_is_none(folder, emitted, facts):
    expected = softmax()
    (name,) = (path for path in folder.iterdir() if b'"slots"' in path.read_bytes())
    system.write_entry(name, facts)
    np.testing.assert_array_equal(softmax(), expected)
    assert len(emitted) == 2


def test_entries_in_the_place_of_others_are_made_again(folder, emitted):
    expected = softmax()
    paths = sorted(folder.iterdir())
    contents = [path.read_bytes() for path in paths]
    for path, data in zip(paths, contents[1:] + contents[:1], strict=True):
        path.write_bytes(data)
    np.testing.assert_array_equal(softmax(), expected)
    assert len(emitted) == 2


def test_other_sources_write_the_text_and_find_the_code(monkeypatch, emitted):
    expected, compiled = softmax(), jit.compilations()
    monkeypatch.setattr(system, "sources", lambda: "others")
    kernel_store._origin.cache_clear()
    np.testing.assert_array_equal(softmax(), expected)
    kernel_store._origin.cache_clear()
    assert len(emitted) == 2 and jit.compilations() == compiled


def test_sources_that_changed_are_like_no_others(monkeypatch):
    before = system.sources.__wrapped__()
    monkeypatch.setattr(system, "_LOADED", 0)  # as if all files were written after the start
    changed = system.sources.__wrapped__()
    monkeypatch.setattr(system.os, "getpid", lambda: -1)
    assert len({before, changed, system.sources.__wrapped__()}) == 3


def test_sources_may_lie_in_an_archive(monkeypatch, tmp_path):
    archive = tmp_path / "all.zip"
    monkeypatch.setattr(system, "__file__", str(archive / "bitwright" / "system.py"))
    found = set()
    for content in (b"one", b"other"):
        archive.write_bytes(content)
        found.add(system.sources.__wrapped__())
    assert len(found) == 2


def test_targets_have_entries_of_their_own():
    targets = [named(name) for name in ("host", "avx2", "sse2")]
    stores = [KernelStore(target) for target in dict.fromkeys(targets)]
    assert len({store._entry("kernel") for store in stores}) == len(stores)


def test_slots_come_with_the_entry():
    softmax()
    ctx = Lowering(graph_of("softmax", X, axis=-1), host())
    ctx.run()
    (kernel,) = ctx.kernels.values()
    facts = KernelStore(host()).facts(kernel.name)
    assert facts["slots"] == [[slot.name, slot.kind] for slot in kernel.signature.slots]
    assert json.loads(json.dumps(facts)) == facts
    assert KernelStore(host()).find(kernel.name).signature == kernel.signature


def test_a_text_can_be_had_of_a_kernel_that_was_found():
    softmax()
    graph = graph_of("softmax", X, axis=-1)
    found, written = (Lowering(graph, host(), store) for store in (KernelStore(host()), None))
    for ctx in (found, written):
        ctx.run()
    (kernel,) = found.kernels.values()
    assert kernel.code and found.text(kernel) == written.text(kernel)


def test_a_key_that_leaves_something_out_is_noticed():
    def emit(module: Module, name: str, number: int):
        from bitwright.backends.cpu.codegen.emit import Signature, f32

        signature = Signature(("y",))
        with module.kernel(name, signature) as f:
            f.store(f.const(f32, float(number)), f.args.pointer("y"))
        return signature

    ctx = Lowering(graph_of("softmax", X, axis=-1), host())
    ctx.kernel("number", (), lambda m, name: emit(m, name, 1))
    with pytest.raises(pytest.fail.Exception, match="does not tell them apart"):
        ctx.kernel("number", (), lambda m, name: emit(m, name, 2))
