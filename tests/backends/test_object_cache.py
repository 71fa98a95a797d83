"""The object cache: keys, corruption, size limit, read-only folders, concurrency."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from emitted import scale_kernel

from bitwright import knobs, system
from bitwright.backends.cpu.cache import objects as cache_module
from bitwright.backends.cpu.cache.objects import ObjectCache, default_cache, key
from bitwright.backends.cpu.codegen import jit
from bitwright.target import host, named

TEXT = scale_kernel(host()).text()


class Counting:
    """A fake compiler that counts its calls."""

    def __init__(self, code=b"machine code"):
        self.calls, self.code = 0, code

    def __call__(self, text, target):
        self.calls += 1
        return self.code


def got(store, text, compiler):
    """The object code of one module."""
    (code,) = store.get_all([text], host(), lambda texts, target: [compiler(texts[0], target)])
    return code


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "objects"


def test_a_second_process_does_not_compile(folder):
    before = jit.compilations()
    jit.load(TEXT, host(), ObjectCache(folder))
    assert jit.compilations() == before + 1
    library = jit.load(TEXT, host(), ObjectCache(folder))
    assert jit.compilations() == before + 1
    assert library.address("kernel")


def test_the_key_depends_on_text_target_and_version():
    keys = {key(TEXT, named(name)) for name in ("host", "avx2", "sse2", "aarch64")}
    assert len(keys | {key(TEXT + " ", host())}) == 5
    assert key(TEXT, host()) == key(TEXT, host())


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data[: len(data) // 2],
        lambda data: data[:-3] + bytes([data[-3] ^ 1]) + data[-2:],
        lambda data: b"x" + data[1:],
        lambda data: data + b"more",
    ],
)
def test_damaged_entries_are_compiled_again(folder, damage):
    store, compiler = ObjectCache(folder), Counting()
    got(store, TEXT, compiler)
    (path,) = folder.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert got(store, TEXT, compiler) == compiler.code
    assert compiler.calls == 2
    assert got(store, TEXT, compiler) == compiler.code
    assert compiler.calls == 2


def test_the_least_recently_used_entry_is_dropped(folder):
    size = 1000
    store, compiler = ObjectCache(folder, limit=3 * (size + 60)), Counting(b"c" * size)
    for number in range(3):
        got(store, f"text {number}", compiler)
        os.utime(folder / key(f"text {number}", host()), (number, number))
    got(store, "text 0", compiler)  # updates its time of use
    assert compiler.calls == 3
    got(store, "text 3", compiler)
    names = {path.name for path in folder.iterdir()}
    assert names == {key(f"text {number}", host()) for number in (0, 3)}


def test_a_folder_within_its_limit_is_scanned_once(folder, monkeypatch):
    store, compiler = ObjectCache(folder, limit=10_000), Counting(b"c" * 1000)
    looks, scandir = [], os.scandir
    monkeypatch.setattr(
        cache_module.os, "scandir", lambda path: looks.append(path) or scandir(path)
    )
    for number in range(9):
        got(store, f"text {number}", compiler)
    assert looks == [folder] and len(list(folder.iterdir())) == 9
    got(store, "one too many", compiler)
    assert len(set(os.listdir(folder))) == 8


def test_a_read_only_folder_serves_readers(folder, monkeypatch):
    store, compiler = ObjectCache(folder), Counting()
    got(store, TEXT, compiler)

    def refuse(*_, **__):
        raise PermissionError("read only")

    monkeypatch.setattr(system.tempfile, "mkstemp", refuse)
    monkeypatch.setattr(cache_module.os, "utime", refuse)
    assert got(store, TEXT, compiler) == compiler.code
    assert got(store, "another", compiler) == compiler.code
    assert compiler.calls == 2 and len(list(folder.iterdir())) == 1


def test_an_invalid_folder_counts_as_empty(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    compiler = Counting()
    assert got(ObjectCache(blocked / "objects"), TEXT, compiler) == compiler.code


def test_a_failed_write_leaves_nothing_behind(folder, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(system.os, "replace", fail)
    got(ObjectCache(folder), TEXT, Counting())
    assert list(folder.iterdir()) == []


def test_knobs_move_and_disable_it(monkeypatch, tmp_path):
    monkeypatch.setenv(knobs.CACHE.name, str(tmp_path))
    monkeypatch.setenv(knobs.CACHE_BYTES.name, "123")
    assert default_cache().folder == tmp_path / "objects" and default_cache().limit == 123
    for off in ("", "off"):
        monkeypatch.setenv(knobs.CACHE.name, off)
        assert default_cache().folder is None
    monkeypatch.delenv(knobs.CACHE.name)
    assert "bitwright" in str(default_cache().folder)


def test_many_writers_and_readers_agree(folder):
    code = os.urandom(200_000)
    wrong = []

    def work(seed):
        rng = np.random.default_rng(seed)
        for _ in range(40):
            text = f"text {rng.integers(4)}"
            if got(ObjectCache(folder, 500_000), text, Counting(code)) != code:
                wrong.append(text)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_processes_share_entries(folder):
    program = (
        "import sys; from pathlib import Path; from bitwright.backends.cpu.codegen import jit\n"
        "from bitwright.backends.cpu.cache.objects import ObjectCache\n"
        "from bitwright.target import host\n"
        "library = jit.load(sys.stdin.read(), host(), ObjectCache(Path(sys.argv[1])))\n"
        "assert library.address('kernel')\n"
        "print(jit.compilations())"
    )
    counts = [
        subprocess.run(
            [sys.executable, "-c", program, str(folder)],
            input=TEXT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for _ in range(2)
    ]
    assert counts == ["1", "0"]
