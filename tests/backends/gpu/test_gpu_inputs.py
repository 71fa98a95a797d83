"""What callers pass to programs on the GPU: devices, types, layouts, DLPack, threads, memory."""

import pickle
import threading

import numpy as np
import pytest
import torch
from on_gpu import compiled

import bitwright as bw
from bitwright.backends.gpu.runtime import memory
from bitwright.backends.gpu.runtime.direct import DirectRun
from bitwright.errors import RunError

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
native = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")


def doubled(element="f32"):
    b = bw.Builder("doubled")
    x = b.input("x", f"{element}[n, 3]")
    return b.build(y=b.add(x, x))


def two_steps():
    """Two kernels with a result each."""
    b = bw.Builder("two")
    x = b.input("x", "f32[n, 8]")
    return b.build(y=b.softmax(x), z=b.reduce_sum(x, axes=(1,)))


class Capsule:
    """An object of another library: it has DLPack and nothing else."""

    def __init__(self, tensor):
        self._tensor = tensor

    def __dlpack__(self, **options):
        return self._tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._tensor.__dlpack_device__()


def test_objects_with_dlpack_give_tensors_on_their_device():
    exe = compiled(doubled())
    found = exe.run({"x": Capsule(torch.ones(2, 3, device=DEVICE))})["y"]
    assert isinstance(found, torch.Tensor) and found.device.type == DEVICE
    assert found.tolist() == [[2.0] * 3] * 2


def test_tensors_of_the_host_give_tensors_of_the_host():
    found = compiled(doubled()).run({"x": torch.ones(2, 3)})["y"]
    assert isinstance(found, torch.Tensor) and found.device.type == "cpu"
    assert found.tolist() == [[2.0] * 3] * 2


def test_arrays_beside_tensors():
    b = bw.Builder("sum")
    exe = compiled(b.build(y=b.add(b.input("x", "f32[n, 3]"), b.input("w", "f32[3]"))))
    x = torch.ones(2, 3, device=DEVICE)
    found = exe.run({"x": x, "w": np.arange(3, dtype=np.float32)})["y"]
    assert found.device.type == DEVICE and found.tolist() == [[1.0, 2.0, 3.0]] * 2


@pytest.mark.parametrize(
    "element, type_", [("f16", "float16"), ("bf16", "bfloat16"), ("i64", "int64")]
)
def test_element_types_of_tensors(element, type_):
    x = torch.ones(2, 3, device=DEVICE, dtype=getattr(torch, type_))
    found = compiled(doubled(element)).run({"x": x})["y"]
    assert found.dtype == x.dtype and found.tolist() == [[2.0] * 3] * 2
    with pytest.raises(RunError, match="element type"):
        compiled(doubled()).run({"x": x})


def test_layouts():
    exe = compiled(doubled())
    whole = torch.arange(24.0, device=DEVICE).reshape(4, 6)
    for x in (
        whole[:, ::2],
        whole[::2, :3],
        whole.reshape(3, 8).T[:, :3],
        whole[0, :3].expand(5, 3),
    ):
        assert exe.run({"x": x})["y"].tolist() == (2 * x).tolist()
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    for view in (array[::-1, ::2], array.T[:, :3], np.broadcast_to(array[0, :3], (2, 3))):
        np.testing.assert_array_equal(exe.run(view)["y"], 2 * view)


def test_conjugate_views():
    exe = compiled(doubled("c64"), fallbacks=True)
    x = torch.full((2, 3), 1 + 2j, dtype=torch.complex64, device=DEVICE).conj()
    assert exe.run({"x": x})["y"].tolist() == (2 * x).tolist()
    exe = compiled(doubled())
    assert exe.run({"x": x.imag})["y"].tolist() == (2 * x.imag).tolist()


def test_an_input_that_needs_a_gradient_and_inference_mode():
    exe = compiled(doubled())
    x = torch.ones(2, 3, device=DEVICE, requires_grad=True)
    assert not exe.run({"x": x})["y"].requires_grad
    with torch.inference_mode():
        assert exe.run({"x": torch.ones(4, 3, device=DEVICE)})["y"].shape == (4, 3)
    assert exe.run({"x": torch.ones(4, 3, device=DEVICE)})["y"].tolist() == [[2.0] * 3] * 4


@pytest.mark.parametrize("x", [torch.ones(2, 3, device="meta"), torch.eye(3).to_sparse()], ids=str)
def test_tensors_without_elements_are_named(x):
    exe = compiled(doubled())
    with pytest.raises(RunError, match="input 'x'"):
        exe.run({"x": x})
    assert exe.run(np.ones((1, 3), np.float32))["y"].tolist() == [[2.0] * 3]


def test_empty_tensors():
    exe = compiled(two_steps())
    found = exe.run({"x": torch.ones(0, 8, device=DEVICE)})
    assert found["y"].shape == (0, 8) and found["z"].numel() == 0
    assert exe.run({"x": torch.ones(3, 8, device=DEVICE)})["z"].flatten().tolist() == [8.0] * 3


def test_threads_with_programs_of_their_own():
    exes = [compiled(doubled()), compiled(two_steps()), compiled(doubled("f16"))]
    right = []

    def work(number):
        exe, rng = exes[number % 3], np.random.default_rng(number)
        columns, element = (8, np.float32) if number % 3 == 1 else (3, np.float32)
        element = np.float16 if number % 3 == 2 else element
        for rows in (2, 5, 2, 7):
            x = rng.standard_normal((rows, columns)).astype(element)
            found = exe.run(x)
            want = x.sum(1) if number % 3 == 1 else x + x
            got = found["z"].reshape(-1) if number % 3 == 1 else found["y"]
            right.append(np.allclose(got, want, atol=1e-5))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 24


@native
def test_threads_capture_graphs_at_the_same_time():
    right = []

    def work(number):
        exe = compiled(doubled())
        for rows in range(1 + number, 7 + number):
            x = torch.full((rows, 3), float(number), device="cuda")
            for _ in range(4):
                right.append(bool((exe.run({"x": x})["y"] == 2 * number).all()))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 8 * 6 * 4


def test_a_run_that_ran_out_of_memory_leaves_nothing_behind(monkeypatch):
    exe = compiled(two_steps())
    x, allocate = np.ones((3, 8), np.float32), memory.allocate
    for failing in range(4):
        calls = []

        def limited(nbytes, device, what, calls=calls, failing=failing):
            calls.append(what)
            if len(calls) > failing:
                raise memory.DeviceMemoryError(f"the GPU has not enough memory for {what}")
            return allocate(nbytes, device, what)

        rows = np.ones((3 + failing, 8), np.float32)
        monkeypatch.setattr(memory, "allocate", limited)
        try:
            exe.run(rows)
        except RunError as error:
            assert "not enough memory" in str(error)
        monkeypatch.setattr(memory, "allocate", allocate)
        found = exe.run(rows)
        assert found["y"].tolist() == [[0.125] * 8] * (3 + failing)
        assert found["z"].reshape(-1).tolist() == [8.0] * (3 + failing)
    assert exe.run(x)["z"].reshape(-1).tolist() == [8.0] * 3


def test_memory_of_other_sizes_is_given_up_for_a_run(monkeypatch):
    exe, allocate = compiled(two_steps()), memory.allocate
    for rows in (2, 3, 4):
        exe.run(np.ones((rows, 8), np.float32))

    def limited(nbytes, device, what):
        if len(exe.engine._prepared) > 2:
            raise memory.DeviceMemoryError(f"the GPU has not enough memory for {what}")
        return allocate(nbytes, device, what)

    monkeypatch.setattr(memory, "allocate", limited)
    found = exe.run(np.ones((5, 8), np.float32))
    assert found["z"].reshape(-1).tolist() == [8.0] * 5
    assert len(exe.engine._prepared) == 1


def test_a_direct_run_without_room_for_its_results_runs_again(monkeypatch):
    exe, x = compiled(two_steps()), torch.ones(2, 8, device=DEVICE)
    for _ in range(3):
        exe.run({"x": x})
    assert exe.engine.direct_runs

    def no_room(_):
        raise torch.OutOfMemoryError("CUDA out of memory: tried to allocate")

    monkeypatch.setattr(DirectRun, "results", no_room)
    assert exe.run({"x": x})["z"].reshape(-1).tolist() == [8.0] * 2


@native
def test_too_large_a_run_is_an_error_and_the_next_one_works():
    b = bw.Builder("outer")
    x, w = b.input("x", "f32[n, 1]"), b.input("w", "f32[1, n]")
    exe = compiled(b.build(y=b.neg(b.relu(b.mul(x, w)))))
    free = torch.cuda.mem_get_info()[0]
    n = int((1.5 * free / 4) ** 0.5)
    for _ in range(2):
        with pytest.raises(RunError, match="not enough memory"):
            exe.run(np.ones((n, 1), np.float32), np.ones((1, n), np.float32))
        small = np.ones((4, 1), np.float32)
        assert (exe.run(small, small.T)["y"] == -1).all()
    assert torch.cuda.mem_get_info()[0] > 0.8 * free


@native
def test_results_that_do_not_fit_beside_values_between_steps():
    b = bw.Builder("outer")
    x, w = b.input("x", "f32[n, 1]"), b.input("w", "f32[1, n]")
    exe = compiled(b.build(y=b.softmax(b.softmax(b.matmul(x, w)), axis=0)))
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    n = int((0.6 * free / 4) ** 0.5)
    with pytest.raises(RunError, match="not enough memory"):
        exe.run(np.ones((n, 1), np.float32), np.ones((1, n), np.float32))
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] > 0.9 * free
    small = np.ones((4, 1), np.float32)
    assert (exe.run(small, small.T)["y"] == 0.25).all()


@native
def test_a_stream_of_the_caller():
    exe, stream = compiled(doubled()), torch.cuda.Stream()
    x = torch.ones(1000, 3, device="cuda")
    for number in range(5):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            y = exe.run({"x": x * number})["y"] + 1
        torch.cuda.current_stream().wait_stream(stream)
        assert (y == 2 * number + 1).all()


def test_a_program_can_be_pickled():
    exe = compiled(doubled())
    x = np.ones((2, 3), np.float32)
    again = pickle.loads(pickle.dumps(exe))
    assert again.run(x)["y"].tolist() == exe.run(x)["y"].tolist() == [[2.0] * 3] * 2
