"""The backend registry: lookup by target name, the interface, and one way to compile."""

import numpy as np
import pytest

import bitwright as bw
from bitwright.backends import base
from bitwright.backends.base import Backend, find_backend
from bitwright.backends.cpu.runtime.program import Program
from bitwright.backends.reference import ReferenceEngine
from bitwright.errors import BitwrightError, RunError


def doubled():
    b = bw.Builder("doubled")
    return b.build(y=b.mul(b.input("x", "f32[n]"), 2.0))


X = np.arange(3, dtype=np.float32)


@pytest.mark.parametrize("name, engine", [("cpu", Program), ("reference", ReferenceEngine)])
def test_a_backend_builds_loads_and_runs(name, engine):
    backend = find_backend(name)
    assert isinstance(backend, Backend)
    graph = doubled()
    loaded = backend.load(graph, backend.build(graph), threads=1)
    assert isinstance(loaded, engine)
    assert loaded.run({"x": X}, None)["y"].tolist() == [0, 2, 4]


def test_an_unknown_target_lists_the_registered_ones():
    with pytest.raises(BitwrightError, match=r"no target 'gpu'.*'cpu', 'cuda', 'reference'"):
        bw.compile(doubled(), target="gpu")


def test_a_registered_backend_is_a_target(monkeypatch):
    monkeypatch.setattr(base, "_MODULES", dict(base._MODULES))
    base.register_backend("other", "bitwright.backends.reference")
    exe = bw.compile(doubled(), target="other")
    assert exe.run(X)["y"].tolist() == [0, 2, 4]
    with pytest.raises(BitwrightError, match="'cpu', 'cuda', 'other', 'reference'"):
        bw.compile(doubled(), target="gpu")


def test_the_interpreter_has_no_profile():
    with pytest.raises(RunError, match="only compiled models"):
        bw.compile(doubled(), target="reference").engine.profile({"x": X}, 1)
