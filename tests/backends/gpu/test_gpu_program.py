"""Programs on the GPU backend: inputs, outputs, states, sizes, faults, failures of kernels."""

import threading

import numpy as np
import pytest
import torch
from on_gpu import compiled

import bitwright as bw
from bitwright.backends.gpu.codegen.source import Config
from bitwright.backends.gpu.kernels.movement.indices import reach
from bitwright.backends.gpu.lowering.build import build
from bitwright.backends.gpu.lowering.context import Machine
from bitwright.backends.gpu.lowering.operands import Tiles
from bitwright.backends.gpu.runtime.device import current_device
from bitwright.backends.gpu.runtime.kernels import KernelTable
from bitwright.backends.gpu.runtime.program import GpuProgram
from bitwright.backends.gpu.runtime.tuning import Tuner
from bitwright.errors import RunError
from bitwright.ir.dtype import DTYPES
from bitwright.lir.buffer import Buffer, View

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


def scaled(shape="f32[n, 3]"):
    b = bw.Builder("scaled")
    x = b.input("x", shape)
    return b.build(y=b.add(b.mul(x, 2.0), 1.0), z=b.neg(x))


def counter():
    b = bw.Builder("counter")
    x, total = b.input("x", "f32[4]"), b.state("total", np.zeros(4, np.float32))
    after = b.add(total, x)
    b.update(total, after)
    return b.build(y=b.mul(after, 1.0))


def test_arrays_give_arrays_of_their_own():
    exe = compiled(scaled())
    one = exe.run(np.ones((2, 3), np.float32))["y"]
    two = exe.run(np.zeros((2, 3), np.float32))["y"]
    assert one.tolist() == [[3.0] * 3] * 2 and two.tolist() == [[1.0] * 3] * 2


def test_tensors_give_tensors():
    exe = compiled(scaled())
    x = torch.ones(2, 3, device=DEVICE)
    found = exe.run({"x": x})["y"]
    assert isinstance(found, torch.Tensor) and found.device.type == DEVICE
    exe.run({"x": torch.zeros(2, 3, device=DEVICE)})
    assert found.tolist() == [[3.0] * 3] * 2


def test_a_strided_tensor_is_read_in_its_order():
    exe = compiled(scaled())
    x = torch.arange(6.0, device=DEVICE).reshape(3, 2).T
    assert exe.run({"x": x})["z"].tolist() == (-x).tolist()


def test_sizes_vary():
    exe = compiled(scaled())
    for rows in (1, 5, 2, 0, 5, *range(7, 20)):
        x = np.full((rows, 3), 0.5, np.float32)
        assert exe.run(x)["y"].shape == (rows, 3)
        assert (exe.run(x)["y"] == 2).all()


def test_out_is_written_in_place():
    exe = compiled(scaled())
    out = np.empty((1, 3), np.float32)
    found = exe.run(np.ones((1, 3), np.float32), out={"y": out})
    assert found["y"] is out and out.tolist() == [[3.0] * 3]


def test_states_live_across_runs_and_copies():
    exe = compiled(counter())
    x = np.ones(4, np.float32)
    assert [exe.run(x)["y"][0] for _ in range(3)] == [1, 2, 3]
    twin = exe.__copy__()
    assert twin.run(x)["y"][0] == 4 and exe.run(x)["y"][0] == 4
    assert exe.engine.states["total"].tolist() == [4.0] * 4
    exe.reset()
    assert exe.run(x)["y"][0] == 1


def test_wrong_inputs_are_named():
    exe = compiled(scaled())
    with pytest.raises(RunError, match="element type"):
        exe.run(np.ones((2, 3), np.int32))
    with pytest.raises(RunError, match="wrong size on axis 1"):
        exe.run({"x": torch.ones(2, 4, device=DEVICE)})
    assert exe.run(np.ones((1, 3), np.float32))["y"].tolist() == [[3.0] * 3]


def test_threads_share_an_executable():
    exe = compiled(scaled())
    found = {}

    def work(number):
        x = np.full((4, 3), number, np.float32)
        found[number] = [float(exe.run(x)["z"][0, 0]) for _ in range(3)]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: [-float(n)] * 3 for n in range(4)}


def test_what_has_no_kernel_runs_on_the_cpu_and_is_shown():
    b = bw.Builder("solves")
    a, y = b.input("a", "f32[3, 3]"), b.input("y", "f32[3, 1]")
    graph = b.build(x=b.mul(b.solve(a, y), 2.0))
    exe = compiled(graph, fallbacks=True)
    assert [step.op.op for step in exe.engine.fallbacks] == ["solve"]
    found = exe.run(np.eye(3, dtype=np.float32), np.ones((3, 1), np.float32))["x"]
    assert found.tolist() == [[2.0]] * 3


def test_a_node_whose_kernel_does_not_compile_runs_on_the_cpu():
    graph = bw.compile(scaled("f32[2, 3]"), target="cuda").engine.graph
    device = current_device()
    node = next(n.name for n in graph.nodes if not n.is_boundary)
    artifact = build(graph, device.machine, {node: "its kernel does not compile"})
    assert any(step.node == node for step in artifact.fallbacks)
    program = GpuProgram(graph, device, artifact)
    assert program.run({"x": np.ones((2, 3), np.float32)})["y"].tolist() == [[3.0] * 3] * 2


@pytest.mark.parametrize("element", ["f8e5m2", "f8e4m3fn", "bf16", "i4", "f64"])
def test_every_element_type_goes_to_the_cpu_and_back(element):
    b = bw.Builder("g")
    x = b.input("x", f"{element}[2, 3]")
    graph = b.build(y=b.transpose(b.concat(x, x, axis=0), perm=(1, 0)))
    device, given = current_device(), np.arange(6).reshape(2, 3).astype(DTYPES[element].numpy)
    names = [n.name for n in graph.nodes if not n.is_boundary]
    for refused in (names[:1], names[1:], names):
        artifact = build(graph, device.machine, dict.fromkeys(refused, "it is tested"))
        found = GpuProgram(graph, device, artifact).run({"x": given})["y"]
        assert found.dtype == given.dtype
        np.testing.assert_array_equal(found, np.concatenate([given, given]).T)


def test_tuning_takes_the_fastest_candidate_and_remembers_it(monkeypatch, tmp_path):
    monkeypatch.setenv("BITWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setenv("BITWRIGHT_TUNED", "on")
    monkeypatch.setenv("BITWRIGHT_GPU_TUNE", "5")
    exe = compiled(scaled("f32[n]"))
    source = next(iter(exe.engine.artifact.sources.values()))
    wanted = source.configs[-1]
    assert len(source.configs) > 1

    def load(_, config):
        return config

    def measure(config: Config, *_):
        return 0.0 if config is wanted else 1.0

    tuner = Tuner(Machine("test"), measure)
    assert tuner.choose(source, {}, {"columns": 4096}, load) is wanted
    tuner.save()
    again = Tuner(Machine("test"), lambda *_: pytest.fail("measured again"))
    assert again.choose(source, {}, {"columns": 4096}, load) is wanted
    unmeasured = Tuner(Machine("test", interpreted=True))
    assert unmeasured.choose(source, {}, {"columns": 7}, load) is source.configs[0]


def test_later_runs_on_tensors_are_direct_and_give_results_of_their_own():
    exe = compiled(scaled())
    x = torch.arange(6.0, device=DEVICE).reshape(2, 3)
    found = [exe.run({"x": x + n})["z"] for n in range(4)]
    assert len(exe.engine.direct_runs) == 1
    assert [y.tolist() for y in found] == [(-(x + n)).tolist() for n in range(4)]
    strided = torch.arange(6.0, device=DEVICE).reshape(3, 2).T.requires_grad_()
    found = exe.run({"x": strided})
    assert found["z"].tolist() == (-strided).tolist() and not found["z"].requires_grad
    with pytest.raises(RunError, match="element type"):
        exe.run({"x": x.int()})
    assert exe.run({"x": x.cpu().numpy()})["z"].tolist() == (-x).tolist()


def test_direct_runs_follow_states_that_move():
    exe = compiled(counter())
    x = torch.ones(4, device=DEVICE)
    assert [exe.run({"x": x})["y"][0].item() for _ in range(4)] == [1, 2, 3, 4]
    exe.engine.states["total"] = np.full(4, 9, np.float32)
    assert exe.run({"x": x})["y"][0].item() == 10
    exe.reset()
    assert [exe.run({"x": x})["y"][0].item() for _ in range(2)] == [1, 2]


def test_a_fault_of_a_direct_run_is_raised_by_the_next():
    b = bw.Builder("rows")
    table = b.constant(np.arange(12, dtype=np.float32).reshape(4, 3))
    exe = compiled(b.build(y=b.gather(table, b.input("i", "i64[2]"), axis=0)))
    right, wrong = (torch.tensor([1, n], device=DEVICE) for n in (2, 7))
    for _ in range(3):
        assert exe.run({"i": right})["y"].tolist() == [[3, 4, 5], [6, 7, 8]]
    exe.run({"i": wrong})
    if ON_GPU:
        torch.cuda.synchronize()
    with pytest.raises(RunError, match="index 7 is outside"):
        exe.run({"i": right})
    assert exe.run({"i": right})["y"][0].tolist() == [3, 4, 5]


def test_small_kernels_share_a_launch():
    b = bw.Builder("small")
    x, i = b.input("x", "f32[3, 40]"), b.input("i", "i64[2]")
    graph = b.build(p=b.transpose(b.exp(x), perm=(1, 0)), q=b.gather(x, i, axis=0), r=b.neg(x))
    exe = compiled(graph)
    (step,) = exe.engine.schedule.steps[:1]
    assert step.family.startswith("merged_") and "small kernels in one launch" in step.why
    given = np.random.default_rng(0).standard_normal((3, 40), np.float32)
    found = exe.run({"x": given, "i": np.array([2, 0])})
    np.testing.assert_allclose(found["p"], np.exp(given).T, rtol=1e-6)
    assert (found["q"] == given[[2, 0]]).all() and (found["r"] == -given).all()


def test_kernels_that_need_each_other_are_not_merged():
    b = bw.Builder("chain")
    x = b.input("x", "f32[8, 8]")
    y = b.softmax(b.softmax(x, axis=-1), axis=0)
    exe = compiled(b.build(y=y))
    assert not any(s.family.startswith("merged_") for s in exe.engine.schedule.steps)


def test_what_does_not_compile_in_a_thread_is_left_to_the_launch():
    table = KernelTable({}, Tuner(Machine("test")))
    done = []

    def fails():
        raise ValueError("no such instruction")

    ranked = {
        ("a", "first", ""): (0, fails),
        ("b", "first", ""): (0, lambda: done.append("b")),
        ("b", "second", ""): (1, lambda: done.append("second")),
    }
    table._compile_in_threads(ranked)
    assert sorted(done) == ["b", "second"]
    assert table._ready == {("b", "first", ""), ("b", "second", "")}


def test_operands_without_room_for_copies_take_the_static_choice(monkeypatch, tmp_path):
    monkeypatch.setenv("BITWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setenv("BITWRIGHT_TUNED", "on")
    monkeypatch.setenv("BITWRIGHT_GPU_TUNE", "5")
    source = next(iter(compiled(scaled("f32[n]")).engine.artifact.sources.values()))

    def no_room(*_):
        raise torch.OutOfMemoryError("CUDA out of memory: tried to allocate")

    monkeypatch.setattr("bitwright.backends.gpu.runtime.tuning.ColdTimer", no_room)
    tuner = Tuner(Machine("full", interpreted=False))
    for _ in range(2):  # it is not remembered as the fastest
        found = tuner.choose(source, {}, {"columns": 4096}, lambda _, config: config)
        assert found is source.configs[0] and len(tuner.candidates(source, {"columns": 4096})) > 1


def test_direct_runs_keep_their_memory_among_many_sizes():
    b = bw.Builder("any")
    exe = compiled(b.build(y=b.neg(b.input("x", "f32[n]"))))
    often = torch.ones(3, device=DEVICE)
    for _ in range(3):
        exe.run({"x": often})
    first = exe.engine.direct_runs[0]
    for size in range(4, 11):
        exe.run({"x": torch.ones(size, device=DEVICE)})
    exe.run({"x": often})
    assert first.signature in exe.engine._prepared
    exe.run({"x": torch.ones(11, device=DEVICE)})
    assert first.signature in exe.engine._prepared


def test_states_wait_for_the_runs_under_way(monkeypatch):
    exe = compiled(counter())
    exe.run({"x": np.ones(4, np.float32)})
    waits = []
    monkeypatch.setattr(exe.engine.states, "_finish", lambda: waits.append(1))
    exe.engine.states["total"] = exe.engine.states["total"] + 1
    assert len(waits) == 2
    assert exe.run({"x": np.ones(4, np.float32)})["y"][0] == 3


def test_far_columns_have_offsets_of_64_bits():
    rows, columns = 3, 1 << 16
    buffer = Buffer("x", DTYPES["i8"], rows * columns**2)
    for stride, is_wide in ((columns, True), (8, False)):
        tiles = Tiles.of({"x": View(buffer, 0, (rows, columns), (1, stride))}, "t")
        assert (".to(tl.int64)" in tiles.offset("x", "row", "column")) == is_wide
    assert reach(View(buffer, 0, (rows, columns), (1, columns))) >= columns**2
