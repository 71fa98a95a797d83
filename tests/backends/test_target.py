"""Targets are facts, and what they leave out is never generated."""

import pytest
from emitted import Compiled, instructions, scale_kernel

from bitwright import system
from bitwright.backends.cpu import jit
from bitwright.errors import CompileError
from bitwright.target import NAMES, host, named


def test_host_has_sensible_facts():
    machine = host()
    assert machine.runs_here() and machine is host() is named("host")
    assert machine.cores >= 1 and machine.vector_bytes in (16, 32, 64)
    assert 8 << 10 <= machine.l1_bytes < machine.l2_bytes
    assert machine.lanes(32) * 4 == machine.vector_bytes


@pytest.mark.parametrize("name", NAMES)
def test_named_targets_generate_code(name):
    target = named(name)
    code = jit.compile_object(scale_kernel(target).text(), target)
    assert len(code) > 100


def test_an_unknown_target_is_an_error_that_names_those_there_are():
    with pytest.raises(CompileError, match=r"no target is named 'z80'.*avx2"):
        named("z80")


def test_code_of_another_architecture_is_refused_before_it_runs():
    with pytest.raises(CompileError, match="does not run on this machine"):
        Compiled(scale_kernel(named("wasm32")))


@pytest.mark.skipif(not host().is_x86, reason="looks at x86 registers")
@pytest.mark.parametrize(
    "name, register, absent",
    [("avx512", "zmm", ""), ("avx2", "ymm", "zmm"), ("sse2", "xmm", "ymm")],
)
def test_features_left_out_are_not_used(name, register, absent):
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
