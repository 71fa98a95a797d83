"""Parameters of a graph by name, and loading them from mappings and files."""

import json

import ml_dtypes
import numpy as np
import pytest

import bitwright as bw
from bitwright.errors import ImportModelError
from bitwright.frontend.parameters import load_parameters, parameters
from bitwright.frontend.safetensors import read_safetensors
from bitwright.ops.core.interpret import run


def model():
    b = bw.Builder("model")
    x = b.input("x", "f32[batch, 2]")
    y = b.matmul(x, b.parameter("layer.weight", np.ones((2, 3), np.float32)))
    bias = b.parameter("layer.bias", type_="f32[3]", trainable=False)
    count = b.state("count", np.zeros((), np.float32))
    b.update(count, b.add(count, 1.0))
    b.output("y", b.add(b.add(y, bias), count))
    return bw.verify(b.build())


def values():
    return {
        "layer.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
        "layer.bias": np.array([1, 2, 3], np.float32),
        "count": np.float32(10),
    }


def safetensors(arrays, **changes):
    """The bytes of a safetensors file."""
    qvalues = {"float32": "F32", "bfloat16": "BF16", "int64": "I64", "bool": "BOOL"}
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, array in arrays.items():
        raw = np.ascontiguousarray(array).tobytes()
        row = {"dtype": qvalues[array.dtype.name], "shape": list(np.shape(array))}
        header[name] = {**row, "data_offsets": [len(data), len(data) + len(raw)], **changes}
        data += raw
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def assert_loaded(graph):
    np.testing.assert_array_equal(
        run(graph, {"x": np.eye(2, dtype=np.float32)})["y"], values()["layer.weight"] + [11, 12, 13]
    )


def test_parameters_are_those_with_a_value():
    graph = model()
    assert list(parameters(graph)) == ["layer.weight"]
    assert parameters(graph)["layer.weight"] is graph.value("layer.weight").node.attrs["value"]


def test_load_from_a_mapping_keeps_everything_else():
    before = model()
    given = values()
    graph = load_parameters(before, given)
    assert_loaded(graph)
    assert parameters(graph)["layer.weight"] is given["layer.weight"]
    assert not graph.value("layer.bias").node.attrs["trainable"]
    assert [s.name for s, _ in graph.updates] == ["count"]
    assert list(parameters(before)) == ["layer.weight"], "the first graph is as it was"
    assert_loaded(load_parameters(load_parameters(model(), given), graph, strict=False))


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_load_from_files(tmp_path, suffix):
    path = tmp_path / f"model.{suffix}"
    if suffix == "npz":
        np.savez(path, **values())
    else:
        path.write_bytes(safetensors(values()))
    assert_loaded(load_parameters(model(), path))
    assert_loaded(load_parameters(model(), str(path)))


def test_sharded_safetensors(tmp_path):
    one, two = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    one.write_bytes(safetensors({"layer.weight": values()["layer.weight"]}))
    two.write_bytes(safetensors({k: v for k, v in values().items() if k != "layer.weight"}))
    index = tmp_path / "model.safetensors.index.json"
    places = {"layer.weight": one.name, "layer.bias": two.name, "count": two.name}
    index.write_text(json.dumps({"weight_map": places}))
    assert_loaded(load_parameters(model(), index))
    for bad, message in (("../a.safetensors", "own folder"), ("c.safetensors", "cannot read")):
        index.write_text(json.dumps({"weight_map": {**places, "layer.weight": bad}}))
        with pytest.raises(ImportModelError, match=message):
            load_parameters(model(), index)
    index.write_text(json.dumps({"weight_map": {**places, "ghost": one.name}}))
    with pytest.raises(ImportModelError, match="no file has; found"):
        load_parameters(model(), index)


def test_every_fault_is_in_one_error():
    bad = {"layer.weights": values()["layer.weight"], "layer.bias": np.zeros(4, np.float32)}
    with pytest.raises(ImportModelError) as caught:
        load_parameters(model(), bad)
    text = str(caught.value)
    assert "graph 'model': the values do not fit the parameters" in text
    assert "missing: layer.weight (Did you mean 'layer.weights' or 'layer.bias'?)" in text
    assert "unexpected: layer.weights (Did you mean 'layer.weight' or 'layer.bias'?)" in text
    assert "layer.bias: expected f32[3], found f32[4]" in text
    with pytest.raises(ImportModelError, match=r"layer.bias: expected f32\[3\], found f32\[4\]"):
        load_parameters(model(), bad, strict=False)
    partial = load_parameters(model(), {"layer.bias": values()["layer.bias"]}, strict=False)
    assert list(parameters(partial)) == ["layer.weight", "layer.bias"]


def test_types_convert_only_when_asked():
    given = {**values(), "layer.bias": values()["layer.bias"].astype(ml_dtypes.bfloat16)}
    with pytest.raises(ImportModelError, match=r"found bf16\[3\]; convert=True converts it"):
        load_parameters(model(), given)
    graph = load_parameters(model(), given, convert=True)
    assert_loaded(graph)
    assert parameters(graph)["layer.bias"].dtype == np.float32


def test_safetensors_are_mapped_not_read(tmp_path):
    path = tmp_path / "x.safetensors"
    arrays = {
        "half": np.array([[1.5, -2]], ml_dtypes.bfloat16),
        "flag": np.array([True, False]),
        "empty": np.zeros((0, 3), np.int64),
    }
    path.write_bytes(safetensors(arrays))
    for name, array in read_safetensors(path).items():
        assert array.dtype == arrays[name].dtype and array.shape == arrays[name].shape
        assert (array == arrays[name]).all() and not array.flags.writeable


_GOOD = safetensors({"x": np.ones(2, np.float32)})


@pytest.mark.parametrize(
    "data, message",
    [
        (b"", "cannot read"),
        (b"abc", "ends in its first bytes"),
        ((2**60).to_bytes(8, "little") + b"{}", "header is longer"),
        ((4).to_bytes(8, "little") + b"nope", "is damaged"),
        ((2).to_bytes(8, "little") + b"[]", "is damaged"),
        (_GOOD[:-1], "does not fit its offsets"),
        (safetensors({"x": np.ones(2, np.float32)}, shape=[2**60]), "does not fit its offsets"),
        (safetensors({"x": np.ones(2, np.float32)}, shape=[-1, -2]), "has no shape or offsets"),
        (safetensors({"x": np.ones(2, np.float32)}, shape=["2"]), "has no shape or offsets"),
        (safetensors({"x": np.ones(2, np.float32)}, data_offsets=[0]), "has no shape or offsets"),
        (
            safetensors({"x": np.ones(2, np.float32)}, data_offsets=[-8, 0]),
            "has no shape or offsets",
        ),
        (safetensors({"x": np.ones(2, np.float32)}, dtype="F7"), "unknown type"),
        (safetensors({"x": np.ones(2, np.float32)}, dtype=[]), "unknown type"),
    ],
)
def test_damaged_safetensors_are_refused(tmp_path, data, message):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(data)
    with pytest.raises(ImportModelError, match=message):
        read_safetensors(path)


def test_sources_that_cannot_be_read(tmp_path):
    (tmp_path / "x.npz").write_bytes(b"PK\3\4 broken")
    np.savez(tmp_path / "y.npz", x=np.array([{}], object))
    cases = [
        (3, "cannot be read from this"),
        (tmp_path / "x.txt", "no reader is known"),
        (tmp_path / "x.npz", "cannot read"),
        (tmp_path / "y.npz", "cannot read"),
        (tmp_path / "none.npz", "cannot read"),
        ({"layer.bias": object()}, "'layer.bias' is not an array"),
    ]
    for source, message in cases:
        with pytest.raises(ImportModelError, match=message):
            load_parameters(model(), source)


def test_torch_files_hold_tensors_only(tmp_path):
    torch = pytest.importorskip("torch")
    tensors = {name: torch.from_numpy(np.asarray(value)) for name, value in values().items()}
    for content in (tensors, {"state_dict": tensors, "epoch": 3}):
        for zipped in (True, False):
            path = tmp_path / f"model{zipped}.pth"
            torch.save(content, path, _use_new_zipfile_serialization=zipped)
            assert_loaded(load_parameters(model(), path))
    assert_loaded(load_parameters(model(), tensors))
    torch.save({"x": print}, tmp_path / "code.pt")
    with pytest.raises(ImportModelError, match="cannot read"):
        load_parameters(model(), tmp_path / "code.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(ImportModelError, match="holds no state dict"):
        load_parameters(model(), tmp_path / "list.pt")
