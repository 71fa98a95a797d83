"""The cache contains machine code: files that other users may write are not trusted."""

import os
import stat
from pathlib import Path

import numpy as np
import pytest

import bitwright as bw
from bitwright import knobs, system, warn
from bitwright.backends.cpu.codegen import jit
from bitwright.ops.core.builder import Builder
from bitwright.warn import BitwrightWarning

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="the system has no modes")
X = np.arange(12, dtype=np.float32).reshape(3, 4)
SOMEBODY = 54321


@pytest.fixture(autouse=True)
def fresh_warnings():
    warn.forget()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "above" / "cache"
    monkeypatch.setenv(knobs.CACHE.name, str(folder))
    return folder


@pytest.fixture
def model(tmp_path):
    b = Builder("small")
    path = tmp_path / "model.bw"
    b.build(y=b.tanh(b.matmul(b.input("x", "f32[n, 4]"), b.constant(np.eye(4, dtype="f4"))))).save(
        path
    )
    return path


def ran(model):
    """Whether a run compiled code; checks its result."""
    before = jit.compilations()
    found = bw.compile(model, threads=1).run({"x": X})["y"]
    np.testing.assert_allclose(found, np.tanh(X), rtol=1e-6)
    return jit.compilations() > before


def mode(path):
    return stat.S_IMODE(os.stat(path).st_mode)


def give_away(path, monkeypatch):
    """Change the owner of a file or folder, or the user of this process."""
    if os.geteuid() == 0:
        os.chown(path, SOMEBODY, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: SOMEBODY)


def tree(folder: Path):
    return [folder, *folder.rglob("*")]


def test_cache_files_are_private(cache, model):
    before = os.umask(0)
    try:
        assert ran(model)
    finally:
        os.umask(before)
    made = [cache.parent, *tree(cache)]
    assert {mode(path) for path in made if path.is_dir()} == {0o700}
    assert {mode(path) for path in made if path.is_file()} == {0o600}
    assert any(path.name.startswith("model-") for path in made)


@pytest.mark.parametrize("bits", [0o777, 0o770, 0o702])
def test_a_folder_that_others_may_write_is_not_used(cache, model, bits):
    ran(model)
    held = sorted(path.name for path in tree(cache))
    (cache / "objects").chmod(bits)
    with pytest.warns(
        BitwrightWarning, match=r"cache '.*objects': others may write it.*chmod go-w"
    ):
        assert system.read_entry(next((cache / "objects").iterdir())) is None
    with pytest.raises(PermissionError):
        system.write_entry(cache / "objects" / "entry", b"data")
    assert ran(model)
    assert sorted(path.name for path in tree(cache)) == held
    (cache / "objects").chmod(0o700)
    assert not ran(model)


def test_a_folder_of_somebody_else_is_not_used(cache, model, monkeypatch):
    ran(model)
    give_away(cache / "objects", monkeypatch)
    with pytest.warns(BitwrightWarning, match=r"objects': it belongs to user \d+.*another folder"):
        assert ran(model)


@pytest.mark.parametrize("bits", [0o666, 0o660, 0o622])
def test_entries_that_others_may_write_are_replaced(cache, model, bits):
    ran(model)
    objects = cache / "objects"
    for path in objects.iterdir():
        path.chmod(bits)
    with pytest.warns(BitwrightWarning, match="others may write it"):
        assert ran(model)
    assert bw.compile(model, threads=1).run({"x": X})
    code = [path for path in objects.iterdir() if path.name.startswith("model-")]
    assert code
    assert {mode(path) for path in code} == {0o600}


def test_entries_of_somebody_else_are_replaced(cache, model, monkeypatch):
    ran(model)
    objects = cache / "objects"
    if os.geteuid():
        pytest.skip("only root can give files away")
    for path in objects.iterdir():
        give_away(path, monkeypatch)
    with pytest.warns(BitwrightWarning, match="belongs to user"):
        assert ran(model)
    assert not ran(model)


def test_a_cache_of_root_is_read(cache, model, monkeypatch):
    """A read-only folder is used if only root can write it."""
    ran(model)
    if os.geteuid():
        pytest.skip("only root can make folders of root's")
    monkeypatch.setattr(os, "geteuid", lambda: SOMEBODY)
    assert not ran(model)


def test_an_untrusted_host_file_is_not_read(cache):
    from bitwright.target import _cached_host, _host_file, _query_llvm

    facts = _query_llvm()
    path = _host_file()
    if path is None:
        pytest.skip("the system does not tell processors apart")
    assert _cached_host() == facts
    path.chmod(0o666)
    with pytest.warns(BitwrightWarning, match="others may write it"):
        assert _cached_host() is None
