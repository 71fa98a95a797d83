"""What ONNX Runtime does on this machine: without VNNI its u8 x s8 products saturate at 16 bits."""

from functools import cache

import numpy as np


@cache
def multiplies_exactly():
    """Whether a MatMulInteger whose pairs of products leave 16 bits is right."""
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    w = np.full((64, 16), 127, np.int8)
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["x", "w"], ["y"])],
        "probe",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, [8, 64])],
        [helper.make_tensor_value_info("y", TensorProto.INT32, [8, 16])],
        [numpy_helper.from_array(w, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    (y,) = session.run(None, {"x": np.full((8, 64), 255, np.uint8)})
    return bool((y == 255 * 127 * 64).all())
