"""Imported models: names, weights, symbols, functions, bodies, old opsets."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from bitwright.errors import ImportModelError, RunError, UnsupportedError
from bitwright.frontend.onnx import load
from bitwright.frontend.onnx.registry import all_mappings
from bitwright.ir import OpaqueType, symbol
from bitwright.ops.core.interpret import run
from bitwright.ops.core.opdef import draw
from bitwright.pipeline import compile_graph

HEAD = '<ir_version: 10, opset_import: ["" : {opset}, "local" : 1]>\n'


def text_model(text, opset=21):
    return parser.parse_model(HEAD.replace("{opset}", str(opset)) + text)


def import_text(text, opset=21):
    return load(text_model(text, opset))


def ops_of(graph):
    return [node.op for node in graph.nodes if not node.is_boundary]


# names, weights, symbols


def test_names_order_and_origin_are_kept():
    graph = import_text("""
        g (float[n, 4] b, float[4] a) => (float[n, 4] z, float[n, 4] y) {
            y = Relu(b)
            half = Add(y, a)
            z = Neg(half)
        }""")
    assert [v.name for v in graph.inputs] == ["b", "a"]
    assert [name for name, _ in graph.outputs] == ["z", "y"]
    assert graph.value("half").node.op == "add"
    assert graph.value("half").node.loc == "Add"
    assert graph.meta["onnx.opset"].startswith("ai.onnx:21")


def test_names_that_clash_with_ours_stay():
    graph = import_text("""
        g (float[2] add, float[2] const) => (float[2] relu) {
            add_1 = Relu(add)
            relu = Add(add_1, const)
        }""")
    assert [v.name for v in graph.inputs] == ["add", "const"]
    assert graph.outputs[0][1].name == "relu"
    assert graph.value("add_1").node.op == "relu"


def test_float_tensors_are_parameters_and_others_constants():
    weights = {
        "w": np.ones((3, 4), np.float32),
        "half": np.ones(4, np.float16),
        "one": np.ones(1, np.float32),
        "shape": np.array([2, 6], np.int64),
    }
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Mul", ["a", "one"], ["b"]),
        helper.make_node("Cast", ["half"], ["h"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["b", "h"], ["c"]),
        helper.make_node("Reshape", ["c", "shape"], ["y"]),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, 3])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    tensors = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    unused = numpy_helper.from_array(np.ones(9, np.float32), "unused")
    graph = load(helper.make_model(helper.make_graph(nodes, "g", [x], [y], [*tensors, unused])))
    assert [v.name for v in graph.parameters] == ["w", "half"]
    assert [v.name for v in graph.constants] == ["one"]
    assert graph.outputs[0][1].shape == (2, 6)


def test_statistics_of_batch_norm_are_frozen_and_scales_are_constants():
    three = np.ones(3, np.float32)
    nodes = [
        helper.make_node("BatchNormalization", ["x", "s", "b", "m", "v"], ["n"]),
        helper.make_node("QuantizeLinear", ["n", "scale", "zero"], ["y"], axis=1),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3, 4])
    y = helper.make_tensor_value_info("y", TensorProto.INT8, None)
    tensors = [numpy_helper.from_array(three, name) for name in ("s", "b", "m", "v", "scale")]
    tensors.append(numpy_helper.from_array(np.zeros(3, np.int8), "zero"))
    graph = load(helper.make_model(helper.make_graph(nodes, "g", [x], [y], tensors)))
    trainable = {v.name: v.node.attrs["trainable"] for v in graph.parameters}
    assert trainable == {"s": True, "b": True, "m": False, "v": False}
    assert {v.name for v in graph.constants} == {"scale", "zero"}


def test_initializers_that_are_inputs_too_are_parameters():
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [3])
    w = helper.make_tensor_value_info("w", TensorProto.FLOAT, [3])
    node = helper.make_node("Add", ["x", "w"], ["y"])
    tensor = numpy_helper.from_array(np.ones(3, np.float32), "w")
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [3])
    graph = load(helper.make_model(helper.make_graph([node], "g", [x, w], [y], [tensor])))
    assert [v.name for v in graph.inputs] == ["x"]
    assert [v.name for v in graph.parameters] == ["w"]


@pytest.mark.parametrize(
    "param, size",
    [
        ("batch", symbol("batch")),
        ("unk__12", symbol("unk__12")),
        ("batch size", symbol("batch_size")),
        ("3d", symbol("_3d")),
        ("f32", symbol("_f32")),
        ("max", symbol("_max")),
        ("2*n + 1", 2 * symbol("n") + 1),
        ("?", symbol("x_dim0")),
        ("", symbol("x_dim0")),
    ],
)
def test_named_sizes_become_symbols(param, size):
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [param, 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    node = helper.make_node("Relu", ["x"], ["y"])
    graph = load(helper.make_model(helper.make_graph([node], "g", [x], [y])))
    assert graph.inputs[0].shape == (size, 4)


def test_similar_names_stay_distinct():
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["a b", "a_b", None, -1])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    node = helper.make_node("Relu", ["x"], ["y"])
    shape = load(helper.make_model(helper.make_graph([node], "g", [x], [y]))).inputs[0].shape
    assert len(set(shape)) == 4


def test_shape_arithmetic_becomes_attributes():
    graph = import_text("""
        g (float[batch, seq, 24] x) => (float[batch, h, seq, d] y) {
            shape = Shape(x)
            zero = Constant<value_int: int = 0>()
            batch = Gather(shape, zero)
            one = Constant<value_int: int = 1>()
            seq = Gather(shape, one)
            axes = Constant<value_ints: ints = [0]>()
            b1 = Unsqueeze(batch, axes)
            s1 = Unsqueeze(seq, axes)
            tail = Constant<value_ints: ints = [3, -1]>()
            target = Concat<axis = 0>(b1, s1, tail)
            apart = Reshape(x, target)
            y = Transpose<perm = [0, 2, 1, 3]>(apart)
        }""")
    assert ops_of(graph) == ["reshape", "transpose"]
    assert graph.outputs[0][1].shape == (symbol("batch"), 3, symbol("seq"), 8)


def test_data_dependent_sizes_are_operands():
    graph = import_text("""
        g (float[n] x, int64[2] target) => (float[a, b] y, float[c, 1] z) {
            y = Reshape(x, target)
            found = NonZero(x)
            flat = Transpose(found)
            shape = Shape(flat)
            z0 = Cast<to = 1>(flat)
            z = Reshape(z0, shape)
        }""")
    x = np.array([1, 0, 2, 3, 0, 0], np.float32)
    found = run(graph, {"x": x, "target": np.array([2, -1])})
    assert found["y"].shape == (2, 3)
    assert found["z"].tolist() == [[0], [2], [3]]


# functions


FUNCTIONS = """
    g (float[3] x) => (float[3] y) {
        a = local.twice<factor = 3.0>(x)
        y = local.outer(a)
    }
    <domain: "local", opset_import: ["" : 21]>
    twice<factor>(v) => (w) {
        f = Constant<value_float: float = @factor>()
        t = Mul(v, f)
        w = Add(t, v)
    }
    <domain: "local", opset_import: ["" : 21, "local" : 1]>
    outer(v) => (w) {
        t = local.twice<factor = 1.0>(v)
        w = Neg(t)
    }"""


def test_local_functions_are_inlined():
    graph = import_text(FUNCTIONS)
    x = draw(3)
    np.testing.assert_allclose(run(graph, {"x": x})["y"], -8 * x, rtol=1e-6)


def test_functions_that_call_themselves_are_refused():
    text = FUNCTIONS.replace("local.twice<factor = 1.0>(v)", "local.outer(v)")
    with pytest.raises(UnsupportedError, match="calls itself"):
        import_text(text)


def test_functions_that_expand_without_end_are_refused():
    doubling = "\n".join(
        f"""<domain: "local", opset_import: ["" : 21, "local" : 1]>
        f{i}(v) => (w) {{ t = local.f{i + 1}(v)
            w = local.f{i + 1}(t) }}"""
        for i in range(22)
    )
    text = f"""g (float[3] x) => (float[3] y) {{ y = local.f0(x) }}
        {doubling}
        <domain: "local", opset_import: ["" : 21]> f22(v) => (w) {{ w = Identity(v) }}"""
    with pytest.raises(UnsupportedError, match="too many nodes"):
        import_text(text)


@pytest.mark.skipif(
    onnx.defs.onnx_opset_version() < 28, reason="opset 28 is not known to this version of onnx"
)
def test_schema_functions_stand_in_for_missing_mappings():
    assert ("", "SwiGLU") not in all_mappings()
    graph = import_text("g (float[2] a, float[2] b) => (float[2] y) { y = SwiGLU(a, b) }", 28)
    assert "host" not in ops_of(graph)


# bodies


IF = """
    g (bool c, float[n] x, float[n] w) => (float[n] y) {
        outside = Relu(x)
        y = If(c) <
            then_branch = t () => (float[n] p) { p = Add(outside, w) },
            else_branch = e () => (float[n] q) { q = Sub(outside, x) }
        >
    }"""


def test_captures_become_operands():
    graph = import_text(IF)
    node = graph.value("y").node
    assert [v.name for v in node.operands] == ["c", "outside", "w", "x"]
    x, w = draw(4), draw(4, seed=1)
    for flag in (True, False):
        want = np.maximum(x, 0) + (w if flag else -x)
        found = run(graph, {"c": np.array(flag), "x": x, "w": w})["y"]
        np.testing.assert_allclose(found, want, rtol=1e-6)


def test_a_known_condition_leaves_one_branch():
    text = IF.replace("bool c, ", "").replace(
        "outside =", "c = Constant<value: tensor = bool {1}>()\noutside ="
    )
    graph = import_text(text)
    assert ops_of(graph) == ["relu", "add"]


def test_loops_nest_and_carried_shapes_may_grow():
    graph = import_text(
        """
        g (int64 count, float[n, 2] rows, float[1, 2] row) => (float[m, 2] y, float[k, p] sums) {
            go = Constant<value: tensor = bool {1}>()
            y, sums = Loop(count, go, rows) <
                body = b (int64 i, bool c, float[q, 2] have)
                    => (bool c1, float[r, 2] more, float[2] s) {
                    c1 = Identity(c)
                    two = Constant<value_int: int = 2>()
                    bigger = Loop(two, , row) <
                        body = inner (int64 j, bool d, float[1, 2] v) => (bool d1, float[1, 2] v1) {
                            d1 = Identity(d)
                            v1 = Add(v, row)
                        }
                    >
                    more = Concat<axis = 0>(have, bigger)
                    axes = Constant<value_ints: ints = [0]>()
                    s = ReduceSum<keepdims = 0>(more, axes)
                }
            >
        }"""
    )
    rows, row = draw(1, 2), draw(1, 2, seed=1)
    found = run(graph, {"count": np.array(3), "rows": rows, "row": row})
    want = np.concatenate([rows] + [3 * row] * 3)
    np.testing.assert_allclose(found["y"], want, rtol=1e-6)
    assert found["sums"].shape == (3, 2)
    np.testing.assert_allclose(found["sums"][-1], want.sum(0), rtol=1e-5)


SEQUENCE = """
    g (float[2] a, float[2] b, int64 place) => (float[2] y, float[2, 2] z) {
        s = SequenceConstruct(a, b)
        one = Constant<value_int: int = 1>()
        y = SequenceAt(s, PLACE)
        z = ConcatFromSequence<axis = 0, new_axis = 1>(s)
    }"""


@pytest.mark.filterwarnings("ignore::bitwright.warn.BitwrightWarning")
def test_sequences_are_values_of_fallbacks():
    graph = import_text(SEQUENCE.replace("PLACE", "place"))
    assert isinstance(graph.value("s").type, OpaqueType)
    a, b = draw(2), draw(2, seed=1)
    found = run(graph, {"a": a, "b": b, "place": np.array(1)})
    assert found["y"].tolist() == b.tolist()
    assert found["z"].tolist() == [a.tolist(), b.tolist()]


def test_sequences_of_known_elements_need_no_fallback():
    graph = import_text(SEQUENCE.replace("PLACE", "one"))
    assert "host" not in ops_of(graph)
    assert graph.outputs[0][1].name == "b"


# old opsets


def single(op_type, inputs, opset, outputs=1, **attrs):
    """One node on arrays; those that are not floats are initializers."""
    names = [f"x{i}" if a is not None else "" for i, a in enumerate(inputs)]
    made = [f"y{i}" for i in range(outputs)]
    node = helper.make_node(op_type, names, made, **attrs)
    given = {n: a for n, a in zip(names, inputs, strict=True) if a is not None}
    fed = {n: a for n, a in given.items() if a.dtype.kind == "f" and a.ndim}
    infos = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for n, a in fed.items()
    ]
    tensors = [numpy_helper.from_array(a, n) for n, a in given.items() if n not in fed]
    results = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in made]
    graph = helper.make_graph([node], "g", infos, results, tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    found = list(run(load(model), fed).values())
    return found[0] if outputs == 1 else found


X = draw(2, 3, 4, 5)


@pytest.mark.parametrize(
    "found, want",
    [
        (
            lambda: single("Add", [X, draw(3, 4)], 6, broadcast=1, axis=1),
            X + draw(3, 4)[:, :, None],
        ),
        (lambda: single("Mul", [X, draw(5)], 6, broadcast=1), X * draw(5)),
        (lambda: single("Clip", [X], 6, min=-0.5, max=0.5), np.clip(X, -0.5, 0.5)),
        (lambda: single("Clip", [X], 6, max=0.5), np.minimum(X, 0.5)),
        (lambda: single("Reshape", [X], 1, shape=[0, -1]), X.reshape(2, -1)),
        (
            lambda: single("Slice", [X], 1, starts=[1, -3], ends=[9, -1], axes=[1, 3]),
            X[:, 1:, :, -3:-1],
        ),
        (lambda: single("Squeeze", [X[:1]], 11, axes=[0]), X[0]),
        (lambda: single("Unsqueeze", [X], 11, axes=[0, -1]), X[None, ..., None]),
        (lambda: single("Concat", [X, X], 1), np.concatenate([X, X], 1)),
        (
            lambda: single("Pad", [X], 1, paddings=[0, 0, 1, 0, 0, 0, 0, 2], value=3.0),
            np.pad(X, [(0, 0), (0, 0), (1, 0), (0, 2)], constant_values=3),
        ),
        (
            lambda: single("Pad", [X], 2, pads=[0, 0, 1, 0, 0, 0, 0, 2], mode="edge"),
            np.pad(X, [(0, 0), (0, 0), (1, 0), (0, 2)], "edge"),
        ),
        (lambda: single("Upsample", [X], 7, scales=[1.0, 1.0, 2.0, 1.0]), X.repeat(2, 2)),
        (
            lambda: single("Upsample", [X], 1, height_scale=2.0, width_scale=3.0),
            X.repeat(2, 2).repeat(3, 3),
        ),
        (lambda: single("ReduceSum", [X], 1, axes=[1, -1], keepdims=0), X.sum((1, 3))),
        (lambda: single("ReduceMax", [X], 11), X.max(keepdims=True)),
        (lambda: single("TopK", [X], 1, outputs=2, k=2)[0], np.sort(X, -1)[..., :2:-1]),
        (lambda: single("Dropout", [X], 6, is_test=1), X),
        (lambda: single("PRelu", [X, draw(3)], 6), np.where(X < 0, X * draw(3)[:, None, None], X)),
        (lambda: single("Cast", [X], 1, to="DOUBLE"), X.astype(np.float64)),
        (
            lambda: single("Gemm", [X[0, 0], draw(5, 2), draw(2)], 6, broadcast=1),
            X[0, 0] @ draw(5, 2) + draw(2),
        ),
        (lambda: single("Tile", [X, np.array([2, 1, 1, 3])], 6), np.tile(X, (2, 1, 1, 3))),
        (lambda: single("Split", [X], 2, outputs=2, axis=3, split=[2, 3])[1], X[..., 2:]),
        (lambda: single("Resize", [X, np.array([1, 1, 2, 1], np.float32)[()]], 10), X.repeat(2, 2)),
    ],
)
def test_old_forms(found, want):
    result = found()
    assert result.dtype == want.dtype
    np.testing.assert_allclose(result, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("start, stop, expected", [(-9, -9, [0]), (-9, 1, []), (-3, -9, [0])])
def test_a_slice_backwards_from_before_the_first_element(start, stop, expected, constant):
    """ONNX clamps the start into the axis; a Python slice is empty there."""
    values = dict(zip("abcd", (start, stop, 0, -1), strict=True))
    typed = [f"int64[1] {name}" for name in values]
    held = f"<{', '.join(f'int64[1] {name} = {{{v}}}' for name, v in values.items())}>"
    graph = import_text(
        f"g ({', '.join(['float[3] x', *([] if constant else typed)])}) => (float[m] y)"
        f"{held if constant else ''} {{ y = Slice(x, a, b, c, d) }}"
    )
    feeds = {} if constant else {name: np.array([v]) for name, v in values.items()}
    found = run(graph, {"x": np.arange(3, dtype=np.float32), **feeds})["y"]
    assert found.tolist() == expected


SPLIT = """
    g (float[{size}, 2] x, int64[3] sizes) => (float[a, 2] p, float[b, 2] q, float[c, 2] r) {
        p, q, r = Split<axis = 0>(x, sizes)
    }"""
GOOD = [[1, 2, 3], [6, 0, 0], [0, 0, 6]]
BAD = [[1, 2, 2], [2, 2, 3], [7, -2, 1], [-1, 4, 3], [2**62, 2**62, 6], [2**63 - 1, 2**63 - 1, 8]]


@pytest.mark.parametrize("target", ["cpu", "reference"])
@pytest.mark.parametrize("size", ["6", "n"])
def test_data_dependent_sizes_of_a_split(size, target):
    graph = import_text(SPLIT.replace("{size}", size))
    assert "host" not in ops_of(graph)
    executable = compile_graph(graph, target=target)
    x = draw(6, 2)
    for sizes in GOOD:
        found = executable.run({"x": x, "sizes": np.array(sizes)})
        assert [len(part) for part in found.values()] == sizes
        np.testing.assert_array_equal(np.concatenate(list(found.values())), x)
    for sizes in BAD:
        with pytest.raises(RunError, match=r"from Split.*do not add up to axis 0"):
            executable.run({"x": x, "sizes": np.array(sizes)})


def test_a_split_has_as_many_sizes_as_parts():
    with pytest.raises(ImportModelError, match="do not fit the parts"):
        import_text(SPLIT.replace("{size}", "6").replace("int64[3]", "int64[2]"))


def test_softmax_of_opset_11_runs_over_all_trailing_axes():
    flat = np.exp(X.reshape(2, -1))
    want = (flat / flat.sum(1, keepdims=True)).reshape(X.shape)
    np.testing.assert_allclose(single("Softmax", [X], 11), want, rtol=1e-5)


# faults


@pytest.mark.parametrize(
    "text, message",
    [
        ("g (float[2] x) => (float[2] y) { y = Relu(z) }", "'z'"),
        ("g (float[2] x) => (float[2] y) { z = Relu(x) }", "output 'y'"),
        ("g (float[2] x) => (float[2] y) { y = Relu(x)\ny = Neg(x) }", "computed twice"),
        ("g (float[2] x, float[3] w) => (float[2] y) { y = Add(x, w) }", "do not broadcast"),
        ("g (float[2] x) => (float[2] y) { y = Relu(x, x) }", "number of inputs"),
        ("g (float[2] x) => (float[2] y) { y = local.Nothing(x) }", "Nothing"),
        ("g (float[2] x) => (float[2] y) { y = NoSuchOp(x) }", "NoSuchOp"),
        ("g (float[2, 3] x) => (float y) { y = Flatten<axis = 7>(x) }", "axis 7"),
        ("g (float[2] x) => (float y) { y = Cast<to = 99>(x) }", "99"),
        ("g (float[2] x) => (float y) { y = Cast(x) }", "'to' is missing"),
    ],
)
def test_faults_name_the_node(text, message):
    with pytest.raises(ImportModelError, match=message):
        import_text(text)


@pytest.mark.parametrize("opset", [0, 999])
def test_opsets_that_are_not_known(opset):
    model = text_model("g (float[2] x) => (float[2] y) { y = Relu(x) }")
    model.opset_import[0].version = opset
    with pytest.raises(UnsupportedError, match=f"opset {opset}"):
        load(model)


def test_light_models_of_the_onnx_package_load_without_fallbacks():
    folder = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
    for path in sorted(folder.glob("*.onnx")):
        graph = load(path)
        assert "host" not in ops_of(graph), path.name
