"""Runs exported models outside bitwright and compares with the interpreter."""

import numpy as np
import onnx
import onnxruntime as ort
from onnx.reference import ReferenceEvaluator

from bitwright.export.onnx import export_onnx
from bitwright.ir import dtype
from bitwright.ir.types import TensorType
from bitwright.ops.core.builder import Builder

NATIVE = {"f64", "f32", "f16", "i64", "i32", "i16", "i8", "u64", "u32", "u16", "u8"}
NATIVE |= {"bool", "string", "c64", "c128"}


def element(array):
    return dtype(np.asarray(array).dtype)


def one_node(op, case):
    """A graph of one node whose feeds and results have numpy types.

    Operands of other element types are constants, results of other element types are widened.
    """
    b = Builder(op.name)
    feeds, values = {}, []
    for i, x in enumerate(case.inputs):
        if x is None:
            values.append(None)
        elif element(x).name in NATIVE:
            feeds[f"in{i}"] = x
            values.append(b.input(f"in{i}", TensorType(element(x), x.shape)))
        else:
            values.append(b.constant(x))
    node = b.node(op.name, values, case.attrs, [])
    results = []
    for value in node.outputs:
        exotic = isinstance(value.type, TensorType) and value.dtype.name not in NATIVE
        wider = "f32" if exotic and value.dtype.is_float else "i32"
        results.append(b.cast(value, to=wider) if exotic else value)
    return b.build(*results), feeds


def checked(graph, **options):
    """The exported model, which the checker with full shape inference accepts."""
    model = export_onnx(graph, **options)
    onnx.checker.check_model(model, full_check=True)
    return model


def run_ort(model, feeds):
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    data = model if isinstance(model, (str, bytes)) else model.SerializeToString()
    session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(None, feeds), strict=True))


def run_reference(model, feeds):
    names = [value.name for value in model.graph.output]
    with np.errstate(all="ignore"):
        return dict(zip(names, ReferenceEvaluator(model).run(None, feeds), strict=True))


def assert_same(found, expected, tolerance=1e-5):
    """Equal names, shapes and types; floats within the tolerance of the largest value."""
    assert list(found) == list(expected)
    for name, want in expected.items():
        got, want = np.asarray(found[name]), np.asarray(want)
        assert got.shape == want.shape, name
        if element(want).name == "string":
            assert got.astype(str).tolist() == want.astype(str).tolist()
            continue
        assert element(got) == element(want), name
        if want.dtype.kind in "biu":
            np.testing.assert_array_equal(got, want, err_msg=name)
            continue
        wide = np.complex128 if want.dtype.kind == "c" else np.float64
        finite = np.abs(want.astype(wide)[np.isfinite(want)])
        scale = finite.max(initial=1e-30)
        np.testing.assert_allclose(
            got.astype(wide),
            want.astype(wide),
            rtol=tolerance,
            atol=tolerance * scale,
            err_msg=name,
        )
