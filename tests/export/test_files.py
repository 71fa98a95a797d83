"""Model files: inline or external data, packed, aligned, atomic, and without copies in memory."""

import resource
import shutil
import tracemalloc
from itertools import pairwise

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx_runs import assert_same, run_ort

from bitwright.errors import ExportError
from bitwright.export.onnx import export_onnx, files
from bitwright.ir import dtype
from bitwright.ir.dtype import DTYPES
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run

MIB = 1 << 20


def layers(*widths, name="mlp"):
    b = Builder(name)
    x = b.input("x", f"f32[batch, {widths[0]}]")
    rng = np.random.default_rng(0)
    for i, (m, n) in enumerate(pairwise(widths)):
        x = b.matmul(x, b.parameter(f"w{i}", rng.normal(size=(m, n)).astype(np.float32)))
    return b.build(y=x)


def one(array, name="w"):
    b = Builder("one")
    return b.build(y=b.parameter(name, array))


def test_the_streamed_file_is_the_model_in_memory(tmp_path):
    graph = layers(64, 128, 32)
    export_onnx(graph, tmp_path / "m.onnx")
    assert onnx.load(tmp_path / "m.onnx") == export_onnx(graph)
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]


def test_external_data_on_request(tmp_path):
    graph = layers(64, 600, 600, 3)
    path = tmp_path / "m.onnx"
    assert export_onnx(graph, path, external_data=True) is None
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.onnx", "m.onnx.data"]
    onnx.checker.check_model(str(path), full_check=True)
    model = onnx.load(path, load_external_data=False)
    places = {}
    for tensor in model.graph.initializer:
        places[tensor.name] = {entry.key: entry.value for entry in tensor.external_data}
    assert all(place["location"] == "m.onnx.data" for place in places.values())
    offsets = {name: int(place["offset"]) for name, place in places.items()}
    assert all(offset % 64 == 0 for offset in offsets.values())
    assert offsets["w1"] % 4096 == 0 and int(places["w1"]["length"]) == 600 * 600 * 4
    feeds = {"x": np.ones((2, 64), np.float32)}
    assert_same(run_ort(str(path), feeds), run(graph, feeds), 1e-4)


def test_small_tensors_stay_in_the_model(tmp_path):
    export_onnx(layers(8, 8, 512), tmp_path / "m.onnx", external_data="weights.bin")
    model = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    assert [len(tensor.external_data) for tensor in model.graph.initializer] == [0, 3]
    assert (tmp_path / "weights.bin").stat().st_size == 8 * 512 * 4


def test_nothing_external_makes_no_file(tmp_path):
    export_onnx(layers(4, 4), tmp_path / "m.onnx", external_data=True)
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]


def test_large_models_use_external_data(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PROTOBUF_LIMIT", 4000)
    graph = layers(32, 64)
    export_onnx(graph, tmp_path / "m.onnx")
    assert (tmp_path / "m.onnx.data").exists()
    with pytest.raises(ExportError, match=r"bytes; expected at most 4,000 .* external_data"):
        export_onnx(graph, tmp_path / "n.onnx", external_data=False)
    with pytest.raises(ExportError, match="does not fit one ModelProto"):
        export_onnx(graph)
    assert not (tmp_path / "n.onnx").exists()


@pytest.mark.parametrize("name", ["../out.bin", "/tmp/out.bin", "m.onnx", ""])
def test_external_data_is_in_the_folder_of_the_model(tmp_path, name):
    if not name:
        export_onnx(layers(4, 4), tmp_path / "m.onnx", external_data=name)  # the empty name is "no"
        return
    with pytest.raises(ExportError, match="external data cannot be named"):
        export_onnx(layers(32, 64), tmp_path / "m.onnx", external_data=name)


def test_external_data_needs_a_path():
    with pytest.raises(ExportError, match="external data needs a path"):
        export_onnx(layers(4, 4), external_data=True)


def test_a_failed_export_leaves_the_old_files(tmp_path, monkeypatch):
    path = tmp_path / "m.onnx"
    export_onnx(layers(32, 64), path, external_data=True)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def no_room(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "raw_pieces", no_room)
    with pytest.raises(ExportError, match="No space left on device"):
        export_onnx(layers(64, 64), path, external_data=True)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ExportError, match=r"cannot write .*missing"):
        export_onnx(layers(4, 4), tmp_path / "missing" / "m.onnx")


STORED = [name for name in DTYPES if name != "string"]


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (0, 4)], ids=str)
def test_every_type_is_stored_exactly(name, shape):
    element = dtype(name)
    rng = np.random.default_rng(0)
    low, high = (0, 2) if name == "bool" or not element.is_signed else (-2, 2)
    array = rng.integers(low, high, shape).astype(element.numpy)
    model = export_onnx(one(array))
    stored = model.graph.initializer[0]
    assert len(stored.raw_data) == element.nbytes(array.size)
    back = numpy_helper.to_array(stored)
    assert back.shape == array.shape
    assert back.astype(array.dtype).tobytes() == array.tobytes()


def test_packed_values_fill_bytes_from_the_low_bits():
    qvalues = np.array([1, -2, 3], ml_dtypes.int4)
    assert export_onnx(one(qvalues)).graph.initializer[0].raw_data == bytes([0xE1, 0x03])
    qvalues = np.array([1, -2, -1, 0, 1], ml_dtypes.int2)
    assert export_onnx(one(qvalues)).graph.initializer[0].raw_data == bytes([0b00_11_10_01, 0b01])


def test_strings_are_stored_as_bytes():
    words = np.array([["a", "ü"], [b"raw", ""]], object)
    stored = export_onnx(one(words)).graph.initializer[0]
    assert list(stored.string_data) == [b"a", "ü".encode(), b"raw", b""]


def test_views_are_stored_in_row_major_order(tmp_path, monkeypatch):
    monkeypatch.setattr("bitwright.export.onnx.tensors.PIECE", 8)
    array = np.arange(60, dtype=np.float32).reshape(3, 4, 5).transpose(2, 0, 1)[:, ::2]
    narrow = np.arange(-8, 8).astype(ml_dtypes.int4).reshape(4, 4).T
    for view in (array, narrow):
        export_onnx(one(view), tmp_path / "m.onnx")
        back = numpy_helper.to_array(onnx.load(tmp_path / "m.onnx").graph.initializer[0])
        np.testing.assert_array_equal(back, view)


@pytest.mark.parametrize("external_data", [True, False])
def test_large_arrays_are_never_doubled(tmp_path, external_data):
    graph = one(np.ones((16 * MIB // 4,), np.float32))
    export_onnx(layers(4, 4), tmp_path / "warm.onnx")
    tracemalloc.start()
    export_onnx(graph, tmp_path / "m.onnx", external_data=external_data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 * MIB
    assert sum(p.stat().st_size for p in tmp_path.glob("m.*")) > 16 * MIB


@pytest.mark.slow
def test_a_model_above_two_gigabytes(tmp_path):
    """The array is 2.2 GB of untouched zeros, so that resident memory shows any copy."""
    free = shutil.disk_usage(tmp_path).free
    if free < 4 << 30:
        pytest.skip(f"{free >> 20} MiB of disk are not enough")
    b = Builder("large")
    table = b.parameter("table", np.zeros((1 << 20, 550), np.float32))
    graph = b.build(y=b.gather(table, b.input("ids", "i64[n]")))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    export_onnx(graph, tmp_path / "m.onnx")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 100 << 10  # in KiB
    assert (tmp_path / "m.onnx.data").stat().st_size == (1 << 20) * 550 * 4
    assert (tmp_path / "m.onnx").stat().st_size < 1000
    onnx.checker.check_model(str(tmp_path / "m.onnx"), full_check=True)
