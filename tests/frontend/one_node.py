"""Models of one node, run by ONNX Runtime and by bitwright."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from bitwright.frontend.onnx import load
from bitwright.ops.core.interpret import run

Array = np.ndarray[Any, Any]
MICROSOFT = "com.microsoft"


def model(
    op_type: str,
    inputs: Sequence[Array | None],
    outputs: int | Sequence[bool] = 1,
    *,
    domain: str = MICROSOFT,
    version: int = 17,
    constants: Iterable[int] = (),
    dynamic: Mapping[int, str] | None = None,
    **attrs: Any,
) -> onnx.ModelProto:
    """A model of one node; inputs in `constants` are initializers.

    `dynamic` lists the sizes that become symbolic.
    """
    wanted = [True] * outputs if isinstance(outputs, int) else list(outputs)
    names = [f"x{i}" if x is not None else "" for i, x in enumerate(inputs)]
    made = [f"y{i}" if want else "" for i, want in enumerate(wanted)]
    node = helper.make_node(op_type, names, made, domain=domain, **attrs)
    fixed = set(constants)
    infos, weights = [], []
    for i, (name, x) in enumerate(zip(names, inputs, strict=True)):
        if x is None:
            continue
        if i in fixed:
            weights.append(numpy_helper.from_array(x, name))
        else:
            shape = [(dynamic or {}).get(size, size) for size in x.shape]
            code = helper.np_dtype_to_tensor_dtype(x.dtype)
            infos.append(helper.make_tensor_value_info(name, code, shape))
    results = [
        helper.make_tensor_value_info(name, TensorProto.UNDEFINED, None) for name in made if name
    ]
    for info in results:
        info.ClearField("type")
    graph = helper.make_graph([node], "one", infos, results, weights)
    opsets = [helper.make_opsetid("", version), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def feeds(proto: onnx.ModelProto, inputs: Sequence[Array | None]) -> dict[str, Array]:
    """The arrays of the model's inputs by name."""
    names = {info.name for info in proto.graph.input}
    return {f"x{i}": x for i, x in enumerate(inputs) if x is not None and f"x{i}" in names}


def by_onnxruntime(proto: onnx.ModelProto, given: Mapping[str, Array]) -> list[Any]:
    """The results of ONNX Runtime without its optimizer."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return list(session.run(None, dict(given)))


def by_bitwright(proto: onnx.ModelProto, given: Mapping[str, Array]) -> list[Any]:
    graph = load(proto)
    assert not any(node.op == "host" for _, node in graph.walk())
    return list(run(graph, given).values())


def compare(
    op_type: str,
    inputs: Sequence[Array | None],
    outputs: int | Sequence[bool] = 1,
    *,
    tolerance: float = 1e-5,
    steps: int = 0,
    **options: Any,
) -> list[Any]:
    """Fail unless both give the same; floats within `tolerance` of the output's scale,
    integers within so many `steps`. Returns bitwright's results."""
    proto = model(op_type, inputs, outputs, **options)
    given = feeds(proto, inputs)
    expected, found = by_onnxruntime(proto, given), by_bitwright(proto, given)
    agree(expected, found, tolerance, steps)
    return found


def agree(expected: Sequence[Any], found: Sequence[Any], tolerance: float, steps: int = 0) -> None:
    assert len(expected) == len(found)
    for want, have in zip(expected, found, strict=True):
        assert have.dtype == want.dtype
        assert have.shape == want.shape
        if want.dtype.kind in "iub":
            distance = np.abs(want.astype(np.int64) - have.astype(np.int64))
            assert distance.max(initial=0) <= steps
        else:
            scale = max(float(np.abs(want.astype(np.float64)).max(initial=0)), 1e-6)
            np.testing.assert_allclose(
                have.astype(np.float64), want.astype(np.float64), 0, tolerance * scale
            )
