"""The model cache: a later process reads the compiled model, or compiles it again."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import bitwright as bw
from bitwright import compiler, knobs, warn
from bitwright.backends.cpu.cache import artifact, digests, models, size_check_cache
from bitwright.backends.cpu.codegen import jit
from bitwright.compiler import CachedExecutable
from bitwright.errors import BitwrightError, RunError
from bitwright.ir.graph import Graph
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run
from bitwright.pipeline import compile_graph
from bitwright.warn import BitwrightWarning

Array = np.ndarray[Any, Any]


def draw(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def small(scale: float = 1.0) -> Graph:
    b = Builder("small")
    x = b.input("x", "f32[n, m]")
    y = b.relu(b.matmul(x, b.constant(draw(5, 7) * np.float32(scale))))
    picked = b.gather(y, b.input("rows", "i64[k]"), axis=0)
    return b.build(y=y, picked=picked)


def feeds(rows: int = 4) -> dict[str, Array]:
    return {"x": draw(rows, 5, seed=1), "rows": np.array([0, rows - 1])}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(knobs.CACHE.name, str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def model(folder: Path) -> Path:
    path = folder / "small.bw"
    small().save(path)
    return path


def entries(folder: Path) -> list[Path]:
    found = (folder / "cache").rglob("model-*")
    return [path for path in found if not path.name.endswith(".sizes")]


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert found[name].tobytes() == array.tobytes(), name


def test_a_model_is_compiled_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = compile_graph(small()).run(feeds())
    same(bw.compile(model).run(feeds()), expected)
    monkeypatch.setattr(compiler, "_pipeline", lambda: pytest.fail("compiled again"))
    before = jit.compilations()
    for threads in (1, 2):
        executable = bw.compile(model, threads=threads)
        assert isinstance(executable, CachedExecutable)
        assert executable.input_names == ("x", "rows")
        assert executable.output_names == ("y", "picked")
        same(executable.run(feeds()), expected)
    assert jit.compilations() == before


PROGRAM = """
import sys
import numpy as np
import bitwright as bw
exe = bw.compile(sys.argv[1])
print(exe.run({"x": np.ones((4, 5), "f4"), "rows": np.array([2])})["picked"].tobytes().hex())
names = ("onnx", "llvmlite.binding", "bitwright.pipeline", "bitwright.ops.core.registry",
         "bitwright.backends.cpu.codegen.emit", "bitwright.backends.cpu.lowering.context")
print([name for name in names if name in sys.modules])
"""


def test_a_warm_start_needs_no_compiler(model: Path) -> None:
    runs = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM, str(model)],
            env=dict(os.environ),
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        for _ in range(2)
    ]
    assert runs[0][0] == runs[1][0]
    assert runs[1][1] == "[]"


def test_graph_history_and_observation_of_a_cached_model(model: Path) -> None:
    bw.compile(model)
    executable = bw.compile(model)
    assert isinstance(executable, CachedExecutable)
    expected = compile_graph(bw.load(model))
    assert str(executable.graph) == str(expected.graph)
    stages = [stage.name for stage in expected.history.stages]
    assert [stage.name for stage in executable.history.stages] == stages
    assert str(executable.engine.schedule) == str(expected.engine.schedule)  # type: ignore[attr-defined]
    seen: list[str] = []
    executable.run(feeds(), observe=lambda value, _: seen.append(value.name))
    assert len(seen) > 2


def test_a_changed_model_is_compiled_again(model: Path) -> None:
    executable = bw.compile(model)
    first = executable.run(feeds())["y"]
    small(scale=2.0).save(model)
    assert np.array_equal(bw.compile(model).run(feeds())["y"], 2 * first)
    with pytest.raises(BitwrightError, match="not what it was"):
        _ = executable.graph
    assert np.array_equal(executable.run(feeds())["y"], first)


def test_changed_external_weights_are_compiled_again(folder: Path) -> None:
    path, weights = folder / "model.onnx", folder / "w.bin"
    w = numpy_helper.from_array(draw(3, 2), "w")
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in (("x", ("n", 3)), ("y", ("n", 2)))
    )
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [x], [y], [w])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    onnx.save(made, path, save_as_external_data=True, location=weights.name, size_threshold=0)
    x_array = draw(4, 3, seed=2)
    for factor in (1, 2, 2):
        weights.write_bytes((draw(3, 2) * np.float32(factor)).tobytes())
        found = bw.compile(path).run({"x": x_array})["y"]
        assert np.allclose(found, factor * (x_array @ draw(3, 2)), rtol=1e-5, atol=1e-5)
    assert isinstance(bw.compile(path), CachedExecutable)
    weights.unlink()
    with pytest.raises(BitwrightError, match="external data"):
        bw.compile(path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data[: len(data) // 2],
        lambda data: data[:-300] + bytes([data[-300] ^ 1]) + data[-299:],
        lambda data: data[:100] + b"x" + data[101:],
        lambda data: b"x" + data[1:],
        lambda data: data + b"more",
    ],
)
@pytest.mark.parametrize("always_read", [True, False])
def test_damaged_model_entries_are_replaced(
    folder: Path, model: Path, damage: Any, always_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not always_read:
        monkeypatch.setattr(digests, "SMALL", 0)
    expected = bw.compile(model).run(feeds())
    (path,) = entries(folder)
    good = path.read_bytes()
    damaged = damage(good)
    path.unlink()  # the first executable still maps it
    path.write_bytes(damaged)
    same(bw.compile(model).run(feeds()), expected)
    assert path.read_bytes() == good


def test_a_digest_is_cached_while_the_file_is_unchanged(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "SMALL", 0)
    monkeypatch.setattr(digests, "_QUIET_SECONDS", -1.0)
    memory, path = digests.Digests(folder / "cache"), folder / "file"
    path.write_bytes(b"one")
    first = memory.of(path)
    assert memory.of(path, 1) != first
    with monkeypatch.context() as patched:
        patched.setattr(digests.hashlib, "file_digest", lambda *_: pytest.fail("read again"))
        assert memory.of(path, 1) == memory.of(path, 1)
    path.write_bytes(b"two")
    os.utime(path, ns=(1, 1))
    assert memory.of(path) != first
    memory.of(path)
    with monkeypatch.context() as patched:
        patched.setattr(digests.hashlib, "file_digest", lambda *_: pytest.fail("read again"))
        memory.update_state(path, 0, lambda: os.utime(path))
        memory.of(path)


def test_the_digest_of_a_new_file_is_not_cached(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "SMALL", 0)
    memory, path = digests.Digests(folder / "cache"), folder / "file"
    path.write_bytes(b"one")
    memory.of(path)
    assert not (folder / "cache").exists()


def test_sizes_are_checked_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bw.compile(model).run(feeds(4))
    fresh = bw.compile(model)
    with pytest.raises(RunError, match="wrong size"):
        fresh.run({"x": draw(4, 6), "rows": np.array([0])})
    fresh.run(feeds(9))
    monkeypatch.setattr(
        size_check_cache.CachedSizeChecks, "_checks", property(lambda _: pytest.fail("again"))
    )
    another = bw.compile(model)
    for rows in (4, 9):
        another.run(feeds(rows))


def test_the_sets_of_sizes_that_a_process_remembers_are_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(size_check_cache, "MAX_KNOWN", 3)
    checked: list[dict[str, int]] = []
    one = size_check_cache.CachedSizeChecks(tmp_path / "sizes", "digest", "text", ["node"])
    one.__dict__["_checks"] = SimpleNamespace(verify=checked.append)
    for size in (1, 2, 1, 3, 4, np.int64(5), 5):
        one.verify({"n": size})
    assert checked == [{"n": size} for size in (1, 2, 3, 4, 5)]


def test_a_bad_index_has_the_same_error(model: Path) -> None:
    bad = {"x": draw(4, 5), "rows": np.array([0, 4])}
    messages = set()
    for executable in (compile_graph(bw.load(model)), bw.compile(model), bw.compile(model)):
        with pytest.raises(RunError, match="index 4") as caught:
            executable.run(bad)
        messages.add(str(caught.value))
    assert len(messages) == 1


def test_state_persists_in_a_cached_executable(folder: Path) -> None:
    b = Builder("counter")
    x = b.input("x", "f32[2]")
    total = b.state("total", np.array([1, 2], np.float32))
    after = b.add(total, x)
    b.update(total, after)
    path = folder / "counter.bw"
    b.build(y=after).save(path)
    for _ in range(2):
        executable = bw.compile(path)
        assert isinstance(executable, CachedExecutable)
        for turn in (1, 2):
            found = executable.run({"x": np.ones(2, np.float32)})["y"]
            assert found.tolist() == [1 + turn, 2 + turn]
        executable.reset()
        assert executable.run({"x": np.ones(2, np.float32)})["y"].tolist() == [2, 3]


def nonzero() -> Graph:
    b = Builder("nonzero")
    return b.build(y=b.nonzero(b.input("x", "f32[n]")))


def sequence() -> onnx.ModelProto:
    """A sequence, which has no buffer, between two interpreter fallbacks."""
    nodes = [
        helper.make_node("SplitToSequence", ["x"], ["parts"], axis=0),
        helper.make_node("Relu", ["x"], ["positive"]),
        helper.make_node("SequenceInsert", ["parts", "positive"], ["more"]),
        helper.make_node("ConcatFromSequence", ["more"], ["y"], axis=0),
    ]
    return made(nodes, [])


def branches() -> onnx.ModelProto:
    """Bodies with their own weights."""
    bodies = {
        f"{name}_branch": helper.make_graph(
            [helper.make_node("Add", ["x", "w"], ["out"])],
            name,
            [],
            [helper.make_tensor_value_info("out", TensorProto.FLOAT, ["n"])],
            [numpy_helper.from_array(draw(40, seed=seed), "w")],
        )
        for seed, name in enumerate(("then", "else"))
    }
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["total"], keepdims=0),
        helper.make_node("Greater", ["total", "zero"], ["is_positive"]),
        helper.make_node("If", ["is_positive"], ["y"], **bodies),
    ]
    return made(nodes, [numpy_helper.from_array(np.float32(0), "zero")])


def made(nodes: list[onnx.NodeProto], weights: list[onnx.TensorProto]) -> onnx.ModelProto:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["m"])
    graph = helper.make_graph(nodes, "g", [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def saved(model: Graph | onnx.ModelProto, folder: Path) -> Path:
    path = folder / ("model.bw" if isinstance(model, Graph) else "model.onnx")
    model.save(path) if isinstance(model, Graph) else onnx.save(model, path)
    return path


def agree(executable: bw.Executable, path: Path) -> None:
    """Compare with the interpreter, for inputs with various numbers of nonzeros."""
    for seed in range(4):
        x = np.maximum(draw(40, seed=seed), -0.5) * (draw(40, seed=seed + 9) > 0)
        expected = run(bw.load(path), {"x": x})["y"]
        assert np.array_equal(executable.run({"x": x})["y"], expected)


def test_fallbacks_are_cached_and_named(folder: Path) -> None:
    path = saved(sequence(), folder)
    for _ in range(3):
        warn.forget()
        with pytest.warns(BitwrightWarning, match="reference interpreter"):
            executable = bw.compile(path)
        agree(executable, path)
    assert isinstance(executable, CachedExecutable)


@pytest.mark.parametrize("make", [nonzero, branches])
def test_data_dependent_sizes_and_bodies_are_not_cached(folder: Path, make: Any) -> None:
    path = saved(make(), folder)
    for _ in range(2):
        agree(bw.compile(path), path)
    assert entries(folder) == []


def test_knobs_disable_the_model_cache(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(knobs.CACHE_BYTES.name, "2000")
    bw.compile(model).run(feeds())
    monkeypatch.setenv(knobs.CACHE.name, "off")
    bw.compile(model).run(feeds())
    assert entries(folder) == []
    monkeypatch.setenv(knobs.CACHE.name, str(folder / "cache"))
    monkeypatch.delenv(knobs.CACHE_BYTES.name)
    monkeypatch.setenv(knobs.DUMP.name, str(folder / "dump"))
    bw.compile(model).run(feeds())
    assert entries(folder) == [] and list((folder / "dump").iterdir())


def test_a_read_only_folder_serves_models(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = bw.compile(model).run(feeds())

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError("read only")

    monkeypatch.setattr("tempfile.mkstemp", refuse)
    monkeypatch.setattr(os, "utime", refuse)
    assert isinstance(bw.compile(model), CachedExecutable)
    same(bw.compile(model).run(feeds(4)), expected)
    bw.compile(model).run(feeds(6))
    (path,) = entries(folder)
    path.unlink()
    same(bw.compile(model).run(feeds()), expected)
    assert entries(folder) == []


def test_the_key_depends_on_model_knobs_sources_and_target(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = models.key_facts()
    keys = {artifact.key("a", facts), artifact.key("b", facts)}
    monkeypatch.setenv(knobs.FOLD_LIMIT.name, "7")
    keys.add(artifact.key("a", models.key_facts()))
    monkeypatch.setattr(models.system, "sources", lambda: "others")
    keys.add(artifact.key("a", models.key_facts()))
    other = replace(models.host(), llvm_features="+other")
    monkeypatch.setattr(models, "host", lambda: other)
    keys.add(artifact.key("a", models.key_facts()))
    assert len(keys) == 5
