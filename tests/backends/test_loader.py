"""The object code loader: supported and rejected objects, and LLVM's loader as the fallback."""

import os
import subprocess
import sys

import numpy as np
import pytest
from emitted import Compiled, scale_kernel

from bitwright import knobs, target
from bitwright.backends.cpu.codegen import jit, loader
from bitwright.backends.cpu.codegen.emit import Module, Signature, f32
from bitwright.backends.cpu.runtime.emitted import runtime_text
from bitwright.errors import CompileError
from bitwright.target import host, named

pytestmark = pytest.mark.skipif(
    not (loader.is_available() and host().is_x86), reason="the loader is for x86-64 on Linux"
)


@pytest.fixture(scope="module")
def code():
    return jit.compile_object(scale_kernel(host()).text(), host())


def test_objects_are_linked_into_one_image(code):
    other = jit.compile_object(runtime_text(host()), host())
    image = loader.Image([code, other])
    addresses = {image.address(name) for name in ("kernel", "run", "start", "work")}
    assert len(addresses) == 4 and 0 not in addresses
    assert image.address("barrier") == 0, "internal functions are not found by name"


def test_two_functions_of_one_name_are_an_error(code):
    with pytest.raises(CompileError, match="two functions are named 'kernel'"):
        loader.Image([code, code])


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"x" * 200])
def test_invalid_objects_are_rejected(data):
    with pytest.raises(loader.LoaderRefusal):
        loader.Image([data])


def test_objects_of_other_machines_are_rejected():
    arm = jit.compile_object(scale_kernel(named("aarch64")).text(), named("aarch64"))
    with pytest.raises(loader.LoaderRefusal, match="not an object for x86-64"):
        loader.Image([arm])


def test_undefined_symbols_are_rejected():
    text = "declare float @sinf(float)\ndefine float @f(float %x) {\n"
    text += "  %y = call float @sinf(float %x)\n  ret float %y\n}\n"
    with pytest.raises(loader.LoaderRefusal, match="'sinf' is not in the object"):
        loader.Image([jit.compile_object(text, host())])


def test_llvm_loads_rejected_objects(code, monkeypatch):
    monkeypatch.setattr(loader, "is_available", lambda: False)
    library = jit.Library([code], host())
    assert library.address("kernel")
    with pytest.raises(CompileError, match="no function 'other'"):
        library.address("other")


def test_distant_constants_are_relocated():
    module = Module(host())
    with module.kernel("kernel", Signature(("y",), ("n",))) as f:
        table = f.module.table(f, f32, np.arange(1000, dtype="f4"))
        f.store(f.load(f32, table, f.args.size("n")) + 0.1, f.args.pointer("y"))
    y = np.zeros(1, "f4")
    Compiled(module)(y=y, n=999)
    assert y[0] == np.float32(999) + np.float32(0.1)


PROGRAM = """
import sys
from bitwright.backends.cpu.codegen import jit
from bitwright.backends.cpu.runtime import native
native.runtime()
print(jit.compilations(), "llvmlite.binding" in sys.modules)
"""


def test_a_warm_start_does_not_load_llvm(tmp_path):
    environment = {**os.environ, knobs.CACHE.name: str(tmp_path), knobs.COMPILERS.name: "1"}
    found = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for _ in range(2)
    ]
    assert found == [["1", "True"], ["0", "False"]]


def test_host_facts_are_cached_until_the_file_is_damaged(tmp_path, monkeypatch):
    monkeypatch.setenv(knobs.CACHE.name, str(tmp_path))
    facts = target._query_llvm()
    assert target._cached_host() == facts
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    assert target._cached_host() is None
    monkeypatch.setenv(knobs.CACHE.name, "off")
    assert target._cached_host() is None and target._query_llvm() == facts


def test_host_facts_without_a_child_process(tmp_path, monkeypatch):
    facts = target._query_llvm()
    monkeypatch.setenv(knobs.CACHE.name, str(tmp_path))
    monkeypatch.setattr(sys, "executable", "/nowhere/python3")
    assert target._query_llvm() == facts
