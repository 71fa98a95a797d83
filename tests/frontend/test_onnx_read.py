"""Reading model files: all storage forms of tensors, and invalid files."""

import os
import subprocess
import sys

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from bitwright.errors import ImportModelError, UnsupportedError
from bitwright.frontend.onnx import load
from bitwright.frontend.onnx.tensor import ELEMENTS, read_sparse, read_tensor
from bitwright.frontend.onnx.wire import split_weights
from bitwright.ops.core.interpret import run
from bitwright.ops.core.opdef import draw


def model_with(tensor, op="Add"):
    """x + w, or another op of an input and the tensor."""
    shape = [max(size, 0) for size in tensor.dims][:64]
    x = helper.make_tensor_value_info("x", tensor.data_type, shape)
    y = helper.make_tensor_value_info("y", tensor.data_type, None)
    node = helper.make_node(op, ["x", tensor.name], ["y"])
    return helper.make_model(helper.make_graph([node], "g", [x], [y], [tensor]))


def weight(count=6, name="w"):
    return numpy_helper.from_array(np.arange(count, dtype=np.float32), name)


# tensors


@pytest.mark.parametrize("code", [c for c, e in ELEMENTS.items() if e.name != "string"])
@pytest.mark.parametrize("raw", [True, False])
def test_every_element_type(code, raw):
    element = ELEMENTS[code]
    array = draw(3, 5, dtype=element, low=-8 if element.is_signed else 0, high=7)
    flat = array.reshape(-1)
    if raw:
        tensor = numpy_helper.from_array(array, "w")
    else:
        tensor = helper.make_tensor("w", code, array.shape, flat)
    found = read_tensor(tensor)
    assert found.dtype == element.numpy
    assert found.shape == (3, 5)
    assert found.tobytes() == array.tobytes()


def test_strings():
    tensor = helper.make_tensor("w", TensorProto.STRING, [2], ["é".encode(), b"\xff"])
    found = read_tensor(tensor)
    assert found[0] == "é"
    assert found[1].encode("utf-8", "surrogateescape") == b"\xff"


def test_sparse_tensors_with_linear_indices_and_coordinates():
    values = numpy_helper.from_array(np.array([5.0, 7.0], np.float32), "v")
    linear = numpy_helper.from_array(np.array([1, 5], np.int64), "i")
    rows = numpy_helper.from_array(np.array([[0, 1], [1, 2]], np.int64), "i")
    for indices in (linear, rows):
        sparse = helper.make_sparse_tensor(values, indices, [2, 3])
        assert read_sparse(sparse).tolist() == [[0, 5, 0], [0, 0, 7]]
    outside = numpy_helper.from_array(np.array([1, 6], np.int64), "i")
    with pytest.raises(ImportModelError, match="outside"):
        read_sparse(helper.make_sparse_tensor(values, outside, [2, 3]))
    with pytest.raises(UnsupportedError, match="too large"):
        read_sparse(helper.make_sparse_tensor(values, linear, [2**30, 2**30]))


@pytest.mark.parametrize(
    "dims, message",
    [
        ([-1, 6], "negative size -1"),
        ([2**60], "does not fit its shape"),
        ([2**40, 2**40, 2**40], "does not fit its shape"),
        ([7], "does not fit its shape"),
        ([1] * 80, "too many dimensions"),
    ],
)
@pytest.mark.parametrize("raw", [True, False])
def test_shapes_that_do_not_fit_are_named(dims, message, raw):
    tensor = weight()
    if not raw:
        tensor = helper.make_tensor("w", TensorProto.FLOAT, [6], np.arange(6.0))
    tensor.dims[:] = dims
    with pytest.raises(ImportModelError, match=message) as caught:
        load(model_with(tensor))
    assert "'w'" in str(caught.value)


def test_element_types_that_are_not_known():
    tensor = weight()
    tensor.data_type = 77
    with pytest.raises(UnsupportedError, match="element type 77"):
        read_tensor(tensor)


# whole files


@pytest.mark.parametrize("data", [b"", b"not a model", b"\x08\x07", b"\xff" * 100, b"graph @g {}"])
def test_other_files_are_refused(data):
    with pytest.raises(ImportModelError):
        load(data)


def test_truncated_files_are_refused_or_read_whole():
    data = model_with(weight(5000)).SerializeToString()
    for cut in range(1, len(data), 997):
        with pytest.raises(ImportModelError):
            load(data[:cut])


def test_other_things_are_refused(tmp_path):
    with pytest.raises(ImportModelError, match="not a model"):
        load(3)
    with pytest.raises(ImportModelError, match="cannot be opened"):
        load(tmp_path / "missing.onnx")
    with pytest.raises(ImportModelError, match="not a regular file"):
        load(tmp_path)


def test_large_weights_stay_in_the_file(tmp_path):
    model = model_with(weight(5000))
    data = model.SerializeToString()
    rest, weights = split_weights(memoryview(data))
    assert len(rest) < 300
    assert bytes(weights[0]) == model.graph.initializer[0].raw_data
    path = tmp_path / "model.onnx"
    path.write_bytes(data)
    for source in (path, data, model):
        graph = load(source)
        (parameter,) = graph.parameters
        assert parameter.name == "w"
        assert parameter.node.attrs["value"].tolist() == list(range(5000))
        zeros = np.zeros(5000, np.float32)
        assert run(graph, {"x": zeros})["y"].tolist() == list(range(5000))


# external data


def external(tensor, location, **entries):
    copy = TensorProto()
    copy.CopyFrom(tensor)
    copy.ClearField("raw_data")
    copy.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, **entries}.items():
        copy.external_data.add(key=key, value=str(value))
    return copy


@pytest.fixture
def folder(tmp_path):
    inside = tmp_path / "model"
    inside.mkdir()
    (inside / "w.bin").write_bytes(b"\0" * 4 + weight().raw_data + b"\0" * 3)
    (tmp_path / "secret.bin").write_bytes(weight().raw_data)
    return inside


def load_external(folder, location, **entries):
    path = folder / "model.onnx"
    path.write_bytes(model_with(external(weight(), location, **entries)).SerializeToString())
    return load(path)


@pytest.mark.parametrize("offset", [4, 5, 0])
def test_external_data_is_mapped(folder, offset):
    graph = load_external(folder, "w.bin", offset=offset, length=24)
    array = graph.parameters[0].node.attrs["value"]
    data = (folder / "w.bin").read_bytes()[offset : offset + 24]
    assert array.tobytes() == data
    assert array.flags.aligned
    assert array.flags.writeable == (offset == 5)  # only unaligned data is copied


def test_data_in_a_folder_below(folder):
    (folder / "data").mkdir()
    (folder / "data" / "w").write_bytes(weight().raw_data)
    graph = load_external(folder, "data/w")
    assert graph.parameters[0].node.attrs["value"].tolist() == list(range(6))


@pytest.mark.parametrize(
    "location, message",
    [
        ("../secret.bin", "outside"),
        ("data/../../secret.bin", "outside"),
        ("..\\secret.bin", "outside"),
        ("/etc/passwd", "outside"),
        ("C:\\secret.bin", "outside"),
        ("", "no location"),
        ("missing.bin", "cannot be found"),
        (".", "not a regular file"),
        ("nul\0byte", "cannot be found"),
    ],
)
def test_external_data_must_be_inside(folder, location, message):
    with pytest.raises(ImportModelError, match=message) as caught:
        load_external(folder, location)
    assert "'w'" in str(caught.value)


def test_links_out_of_the_folder_are_refused(folder):
    (folder / "link.bin").symlink_to(folder.parent / "secret.bin")
    (folder / "up").symlink_to(folder.parent)
    for location in ("link.bin", "up/secret.bin"):
        with pytest.raises(ImportModelError, match="link out"):
            load_external(folder, location)


def test_pipes_do_not_hang(folder):
    os.mkfifo(folder / "pipe")
    with pytest.raises(ImportModelError, match="not a regular file"):
        load_external(folder, "pipe")


@pytest.mark.parametrize(
    "entries, message",
    [
        ({"offset": 8, "length": 24}, "past the end"),
        ({"offset": 2**62}, "past the end"),
        ({"offset": 4, "length": 20}, "does not fit its shape"),
        ({"offset": -4}, "not a number"),
        ({"offset": "x"}, "not a number"),
    ],
)
def test_external_ranges_are_checked(folder, entries, message):
    with pytest.raises(ImportModelError, match=message):
        load_external(folder, "w.bin", **entries)


def test_bytes_have_no_external_data(folder):
    data = model_with(external(weight(), "w.bin", offset=4)).SerializeToString()
    with pytest.raises(ImportModelError, match="given as bytes"):
        load(data)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_two_gigabytes_load_in_little_memory(tmp_path):
    """The data is a sparse file of zeros, mapped and never touched."""
    rows = 1 << 20
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[rows, 600])
    size = rows * 600 * 4
    assert size > 2**31
    with open(tmp_path / "w.bin", "wb") as file:
        file.truncate(size)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", rows])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    graph = helper.make_graph([node], "g", [x], [y], [external(tensor, "w.bin")])
    (tmp_path / "model.onnx").write_bytes(helper.make_model(graph).SerializeToString())
    script = (
        "import re, sys\n"
        "from bitwright.frontend.onnx import load\n"
        "graph = load(sys.argv[1])\n"
        "assert graph.parameters[0].shape == (1 << 20, 600)\n"
        "status = open('/proc/self/status').read()\n"
        "print(re.search(r'VmHWM:\\s+(\\d+)', status)[1])\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "model.onnx")]
    peak = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert peak * 1024 < 300 << 20


def test_model_protos_of_the_onnx_package_load(tmp_path):
    """Files that `onnx.save` writes with external data load."""
    model = model_with(weight(3000))
    path = tmp_path / "saved.onnx"
    onnx.save(model, path, save_as_external_data=True, location="saved.bin", size_threshold=0)
    assert load(path).parameters[0].node.attrs["value"].tolist() == list(range(3000))
