"""A model above 2 GB loads without reading its weights, which stay in the mapped file.

The external data is a sparse file, so that only the written rows take disk space. A separate
process loads the model, and its resident memory is measured.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="resident memory is read from /proc"
)

ROWS, WIDTH, LAYERS, LINE = 1 << 18, 2048, 4, 512
TABLE_BYTES = ROWS * WIDTH * 4
LAYER_BYTES = LINE * WIDTH * 4
LIMIT_MB = 300

LOAD = """
import json, sys
import numpy as np
import bitwright as bw
from bitwright.ops.core.interpret import run

def memory(what):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith(what))

bw.load(sys.argv[1])  # a small model, so that packages are loaded
before = memory("VmRSS")
graph = bw.load(sys.argv[2])
after, peak = memory("VmRSS"), memory("VmHWM")
results = run(graph, {"ids": np.array([1, int(sys.argv[3])])})
held = sum(p.node.attrs["value"].nbytes for p in graph.parameters)
rows = {name: array[:, :3].tolist() for name, array in results.items()}
print(json.dumps({"before": before, "after": after, "peak": peak, "held": held, "rows": rows}))
"""


def external(name, shape, offset, length):
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape)
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "weights.bin"), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def write_large(folder):
    """An embedding of 2 GB, then products whose weights follow it in the file."""
    nodes = [helper.make_node("Gather", ["table", "ids"], ["picked"])]
    tensors = [external("table", [ROWS, WIDTH], 0, TABLE_BYTES)]
    for layer in range(LAYERS):
        name, offset = f"w{layer}", TABLE_BYTES + layer * LAYER_BYTES
        tensors.append(external(name, [WIDTH, LINE], offset, LAYER_BYTES))
        nodes.append(helper.make_node("MatMul", ["picked", name], [f"product{layer}"]))
    products = [f"product{layer}" for layer in range(LAYERS)]
    nodes.append(helper.make_node("Sum", products, ["total"]))
    graph = helper.make_graph(
        nodes,
        "large",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["n"])],
        [
            helper.make_tensor_value_info("picked", TensorProto.FLOAT, ["n", WIDTH]),
            helper.make_tensor_value_info("total", TensorProto.FLOAT, ["n", LINE]),
        ],
        tensors,
    )
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), folder / "large.onnx")
    with open(folder / "weights.bin", "wb") as file:
        file.truncate(TABLE_BYTES + LAYERS * LAYER_BYTES)
        file.seek(TABLE_BYTES - WIDTH * 4)  # the last row of the table
        file.write(np.array([1, 2, 3], np.float32).tobytes())
        file.seek(TABLE_BYTES + (LAYERS - 1) * LAYER_BYTES)  # the last weight's first elements
        file.write(np.array([5, 6, 7], np.float32).tobytes())


def write_small(path):
    info = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"])
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n"])
    node = helper.make_node("Relu", ["x"], ["y"])
    graph = helper.make_graph([node], "small", [info], [out])
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)


@pytest.fixture
def folder(tmp_path):
    yield tmp_path
    for file in tmp_path.iterdir():
        file.unlink()


def test_model_above_2_gb_loads_in_little_memory(folder):
    write_large(folder)
    write_small(folder / "small.onnx")
    data = folder / "weights.bin"
    assert data.stat().st_size > 2 << 30
    assert data.stat().st_blocks * 512 < 1 << 20  # sparse: the disk is not filled
    paths = [str(folder / "small.onnx"), str(folder / "large.onnx")]
    command = [sys.executable, "-c", LOAD, *paths, str(ROWS - 1)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["held"] == data.stat().st_size
    assert found["after"] - found["before"] < 20
    assert found["peak"] < LIMIT_MB
    assert found["rows"]["picked"] == [[0, 0, 0], [1, 2, 3]]
    assert found["rows"]["total"] == [[0, 0, 0], [5, 6, 7]]
