"""The kernel store: a warm start generates no text; invalid entries are replaced."""

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
    """The names of the kernels whose text was generated."""
    names, make = [], KernelStore.make
    monkeypatch.setattr(
        KernelStore, "make", lambda self, name, *rest: names.append(name) or make(self, name, *rest)
    )
    return names


def softmax():
    """The result of a program that is deleted at once, so that only the cache has its kernels."""
    graph = graph_of("softmax", X, axis=-1)
    return CpuBackend(host()).compile(graph, 1).run({"in0": X})["out0"]


def test_cached_kernels_are_neither_emitted_nor_compiled(emitted):
    expected = softmax()
    assert len(emitted) == 1
    compiled = jit.compilations()
    np.testing.assert_array_equal(softmax(), expected)
    assert len(emitted) == 1 and jit.compilations() == compiled


def test_an_empty_cache_is_detected():
    assert not KernelStore(host()).is_used
    softmax()
    assert KernelStore(host()).is_used and not KernelStore(replace(host(), l2_bytes=1)).is_used


def test_kernels_of_live_programs_need_no_cache(emitted, monkeypatch):
    monkeypatch.setenv("BITWRIGHT_CACHE", "off")
    first = build(graph_of("softmax", X, axis=-1), host())
    second = build(graph_of("softmax", X[1:], axis=-1), host())
    assert len(emitted) == 1 and first.objects[0] is second.objects[0]


DAMAGES = [lambda data: b"", lambda data: data[:-1], lambda data: data[:-2] + b"xx"]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", ["name", "code", "both"])
def test_damaged_entries_are_replaced(folder, emitted, damage, kind):
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
def test_an_empty_entry_is_ignored(folder, emitted, facts):
    expected = softmax()
    (name,) = (path for path in folder.iterdir() if b'"slots"' in path.read_bytes())
    system.write_entry(name, facts)
    np.testing.assert_array_equal(softmax(), expected)
    assert len(emitted) == 2


def test_renamed_entries_are_replaced(folder, emitted):
    expected = softmax()
    paths = sorted(folder.iterdir())
    contents = [path.read_bytes() for path in paths]
    for path, data in zip(paths, contents[1:] + contents[:1], strict=True):
        path.write_bytes(data)
    np.testing.assert_array_equal(softmax(), expected)
    assert len(emitted) == 2


def test_other_sources_reuse_object_code(monkeypatch, emitted):
    expected, compiled = softmax(), jit.compilations()
    monkeypatch.setattr(system, "sources", lambda: "others")
    kernel_store._origin.cache_clear()
    np.testing.assert_array_equal(softmax(), expected)
    kernel_store._origin.cache_clear()
    assert len(emitted) == 2 and jit.compilations() == compiled


def test_changed_sources_have_a_unique_digest(monkeypatch):
    before = system.sources.__wrapped__()
    monkeypatch.setattr(system, "_LOADED", 0)  # as if all files were written after the start
    changed = system.sources.__wrapped__()
    monkeypatch.setattr(system.os, "getpid", lambda: -1)
    assert len({before, changed, system.sources.__wrapped__()}) == 3


def test_sources_in_an_archive(monkeypatch, tmp_path):
    archive = tmp_path / "all.zip"
    monkeypatch.setattr(system, "__file__", str(archive / "bitwright" / "system.py"))
    found = set()
    for content in (b"one", b"other"):
        archive.write_bytes(content)
        found.add(system.sources.__wrapped__())
    assert len(found) == 2


def test_targets_have_separate_entries():
    targets = [named(name) for name in ("host", "avx2", "sse2")]
    stores = [KernelStore(target) for target in dict.fromkeys(targets)]
    assert len({store._entry("kernel") for store in stores}) == len(stores)


def test_an_entry_contains_the_slots():
    softmax()
    ctx = Lowering(graph_of("softmax", X, axis=-1), host())
    ctx.run()
    (kernel,) = ctx.kernels.values()
    facts = KernelStore(host()).facts(kernel.name)
    assert facts["slots"] == [[slot.name, slot.kind] for slot in kernel.signature.slots]
    assert json.loads(json.dumps(facts)) == facts
    assert KernelStore(host()).find(kernel.name).signature == kernel.signature


def test_the_text_of_a_cached_kernel():
    softmax()
    graph = graph_of("softmax", X, axis=-1)
    found, written = (Lowering(graph, host(), store) for store in (KernelStore(host()), None))
    for ctx in (found, written):
        ctx.run()
    (kernel,) = found.kernels.values()
    assert kernel.code and found.text(kernel) == written.text(kernel)


def test_an_incomplete_key_is_detected():
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
