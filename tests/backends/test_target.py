"""Targets: facts about machines, and no code outside their features."""

import pytest
from emitted import Compiled, instructions, scale_kernel

import bitwright as bw
from bitwright import cpuid, system, target
from bitwright.backends.cpu.codegen import jit
from bitwright.errors import CompileError
from bitwright.target import NAMES, host, machine, named


def test_the_machine_has_sensible_facts():
    here = machine()
    assert here.runs_here() and here is machine() is named("host")
    assert here.cores >= 1 and here.vector_bytes in (16, 32, 64)
    assert 8 << 10 <= here.l1_bytes < here.l2_bytes
    assert here.lanes(32) * 4 == here.vector_bytes


@pytest.mark.skipif(not machine().is_x86, reason="names an x86 target")
def test_a_knob_restricts_the_code_that_is_generated(monkeypatch):
    monkeypatch.setenv("BITWRIGHT_TARGET", "sse2")
    assert host() is named("sse2") and machine().features >= host().features
    exe = bw.compile(bw.parse("graph @g {\n  input %x: f32[4]\n  return %x\n}"))
    assert exe.engine.target is named("sse2")
    monkeypatch.setenv("BITWRIGHT_TARGET", "host")
    assert host() is machine()


@pytest.mark.parametrize("name, reason", [("z80", "no target is named"), ("wasm32", "not run on")])
def test_an_unsupported_target_knob_is_an_error(monkeypatch, name, reason):
    monkeypatch.setenv("BITWRIGHT_TARGET", name)
    with pytest.raises(CompileError, match=f"BITWRIGHT_TARGET: .*{reason}"):
        host()


@pytest.mark.skipif(not machine().is_x86, reason="x86 processors answer cpuid")
def test_cpuid_identifies_the_processor(monkeypatch):
    monkeypatch.setattr(system.platform, "machine", lambda: "x86_64")
    answer = cpuid.identity()
    assert answer == cpuid.identity() and (answer or system.sys.platform == "win32")
    monkeypatch.setattr(cpuid.platform, "machine", lambda: "s390x")
    assert cpuid.identity() == b""


def test_facts_of_another_processor_are_ignored(monkeypatch):
    monkeypatch.setattr(system, "processor", lambda: "another")
    assert target._query_in_process() is None


@pytest.mark.parametrize("name", NAMES)
def test_named_targets_generate_code(name):
    target = named(name)
    code = jit.compile_object(scale_kernel(target).text(), target)
    assert len(code) > 100


def test_an_unknown_target_is_an_error_that_lists_the_known_ones():
    with pytest.raises(CompileError, match=r"no target is named 'z80'.*avx2"):
        named("z80")


def test_code_of_another_architecture_is_rejected():
    with pytest.raises(CompileError, match="does not run on this machine"):
        Compiled(scale_kernel(named("wasm32")))


@pytest.mark.skipif(not host().is_x86, reason="looks at x86 registers")
@pytest.mark.parametrize(
    "name, register, absent",
    [("avx512", "zmm", ""), ("avx2", "ymm", "zmm"), ("sse2", "xmm", "ymm")],
)
def test_absent_features_are_not_used(name, register, absent):
    found = " ".join(instructions(scale_kernel(named(name))))
    assert f"%{register}" in found
    assert not absent or f"%{absent}" not in found
    assert name != "sse2" or " v" not in found


def test_the_generic_target_runs_here():
    assert named("generic").runs_here()


def test_system_facts_have_fallbacks(monkeypatch, tmp_path):
    monkeypatch.setattr(system, "_CPU", tmp_path)
    assert system.caches() == system.Caches()
    assert system.cores() >= 1
    monkeypatch.setattr(system.sys, "platform", "plan9")
    assert system.futex() is None
