"""Whether other runtimes compute exact integer products on this processor.

On x86 without VNNI, ONNX Runtime and OpenVINO multiply u8 by s8 with `vpmaddubsw`, which adds pairs
of products in 16 bits and saturates. Tests that compare bits with such a product are skipped there;
bitwright's results are always compared with integer arithmetic.
"""

from functools import cache

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper


@cache
def onnxruntime_is_exact() -> bool:
    """Whether MatMulInteger of u8 and s8 gives what integer arithmetic gives."""
    x, w = np.full((4, 64), 255, np.uint8), np.full((64, 16), 127, np.int8)
    node = helper.make_node("MatMulInteger", ["x", "w"], ["y"])
    graph = helper.make_graph(
        [node],
        "probe",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.INT32, (4, 16))],
        [numpy_helper.from_array(w, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    (y,) = session.run(None, {"x": x})
    return bool((y == x.astype(np.int32) @ w.astype(np.int32)).all())


exact_onnxruntime = pytest.mark.skipif(
    not onnxruntime_is_exact(),
    reason="ONNX Runtime saturates products of u8 and s8 on this processor",
)
