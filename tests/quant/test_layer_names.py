"""Readable layer names, patterns that match any of them, and similar names in errors."""

from pathlib import Path

import numpy as np
import pytest

import bitwright as bw
from bitwright import demo
from bitwright.errors import BitwrightError
from bitwright.quant.model.layer_names import LayerNames
from bitwright.quant.model.stages import simplify
from bitwright.report.compare import compare


def draw(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def block():
    """Two projections of one value with generated result names, as importers write them."""
    b = bw.Builder("block")
    x = b.input("x", "f32[n, 16]")
    names = "layers.0.q_proj.weight", "layers.0.k_proj.weight"
    weights = [b.parameter(name, draw(16, 16, seed=i)) for i, name in enumerate(names)]
    parts = [b.matmul(x, b.transpose(weight, perm=(1, 0))) for weight in weights]
    y = b.matmul(b.mul(*parts), b.parameter("layers.0.down_proj.weight", draw(16, 8)))
    return b.build(y=y)


def batches(count=4):
    rng = np.random.default_rng(0)
    return [{"x": rng.normal(size=(8, 16)).astype(np.float32)} for _ in range(count)]


def schemes(graph, data, recipe):
    return {layer.name: layer.scheme for layer in bw.quantize(graph, data, recipe).report.layers}


NAMES = ["layers.0.q_proj", "layers.0.k_proj", "layers.0.down_proj"]


def test_the_report_names_layers_by_their_weights():
    report = bw.quantize(block(), batches()).report
    assert [layer.name for layer in report.layers] == NAMES
    assert [layer.weight for layer in report.layers] == [f"{name}.weight" for name in NAMES]
    assert [layer.value for layer in report.layers] == ["matmul", "matmul_1", "matmul_2"]
    assert "layers.0.down_proj" in str(report) and report.to_json()["layers"][0]["value"]


@pytest.mark.parametrize(
    "pattern",
    [
        "layers.0.down_proj", "layers.0.down_proj.weight", "*.down_proj", "*down_proj.weight",
        "re:layers[.]0[.]down.*", "matmul_2",
    ],
)  # fmt: skip
def test_patterns_match_layers_and_weights(pattern):
    found = schemes(block(), batches(), {"ignore": [pattern]})
    assert found == {
        NAMES[0]: "dynamic_per_token",
        NAMES[1]: "dynamic_per_token",
        NAMES[2]: "float",
    }
    asked = schemes(block(), batches(), {"schemes": {pattern: "static"}})
    assert asked == {
        NAMES[0]: "dynamic_per_token",
        NAMES[1]: "dynamic_per_token",
        NAMES[2]: "static",
    }


def test_ignoring_a_layer_does_not_affect_other_readers():
    """Both projections read x: one of them stays float, the other does not."""
    found = schemes(block(), batches(), {"ignore": ["*.q_proj.weight"]})
    assert found == {
        NAMES[0]: "float",
        NAMES[1]: "dynamic_per_token",
        NAMES[2]: "dynamic_per_token",
    }
    q = bw.quantize(block(), batches(), {"ignore": ["*.q_proj.weight"]})
    exact, held = (bw.compile(m).run(batches()[0])["y"] for m in (block(), q))
    assert np.abs(exact - held).max() < 0.05 * np.abs(exact).max()


@pytest.mark.parametrize("option", [{"ignore": ["X"]}, {"schemes": {"X": "static"}}])
@pytest.mark.parametrize(
    "pattern, near",
    [
        ("layers.0.donw_proj", "layers.0.down_proj"),
        ("*.down_project", "down_proj"),
        ("re:.*q_prj$", "q_proj"),
        ("layers.0.q_proj.weigth", "layers.0.q_proj.weight"),
    ],
)
def test_a_pattern_that_matches_nothing_is_an_error_with_similar_names(option, pattern, near):
    key, given = next(iter(option.items()))
    recipe = {key: [pattern] if isinstance(given, list) else {pattern: "static"}}
    with pytest.raises(BitwrightError, match=r"matches no layer.*Did you mean") as error:
        bw.quantize(block(), batches(), recipe)
    assert repr(pattern) in str(error.value) and repr(near) in str(error.value)


def test_a_pattern_without_similar_names_gets_examples():
    with pytest.raises(BitwrightError, match=r"Layers are, for example, 'layers.0.q_proj'"):
        bw.quantize(block(), batches(), {"ignore": ["zzz"]})


def test_the_error_comes_before_data_is_read():
    def data():
        raise AssertionError("read")
        yield

    with pytest.raises(BitwrightError, match="matches no layer"):
        bw.quantize(block(), data(), {"ignore": ["zzz"]})


def test_folded_weights_keep_their_original_name():
    """Convolutions with a folded batch norm, and a matmul."""
    names = LayerNames(simplify(bw.load(demo.model_path())))
    found = [names.readable(path) for path in ("batch_norm", "batch_norm_1", "matmul")]
    assert found == ["stem", "block1.conv1", "head"]
    assert "block1.conv1.weight" in names.all("batch_norm_1")


def test_given_names_stay_and_shared_names_are_numbered():
    b = bw.Builder("named")
    x, w = b.input("x", "f32[n, 16]"), b.parameter("cell.weight_hh", draw(16, 16))
    h = b.tanh(b.matmul(x, w))
    h = b.tanh(b.matmul(h, w))
    y = b.matmul(h, draw(16, 4), name="logits")
    names = LayerNames(b.build(y=y))
    assert names.readable("logits") == "logits"
    shown = [names.readable(path) for path in ("matmul", "matmul_1")]
    assert shown == ["cell.weight_hh", "cell.weight_hh #2"]
    assert "cell.weight_hh" in names.all("matmul_1")


def test_modules_of_torch_name_layers():
    torch = pytest.importorskip("torch")

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.ReLU())
            self.head = torch.nn.Linear(8, 4)

        def forward(self, x):
            return self.head(self.body(x))

    graph = bw.from_torch(Model().eval(), (torch.zeros(2, 16),))
    name = graph.inputs[0].name
    data = [{name: batch["x"][:2]} for batch in batches()]
    assert list(schemes(graph, data, {"ignore": ["head"]}).items())[-1] == ("head", "float")
    assert set(schemes(graph, data, {"ignore": ["body.0.weight"]})) == {"body.0", "head"}


def test_module_paths_of_exported_files():
    helper = pytest.importorskip("onnx.helper")
    from onnx import TensorProto, numpy_helper

    node = helper.make_node("MatMul", ["x", "val_1"], ["val_2"], name="node_MatMul_1")
    scopes = "['', 'net', 'net.layer.0', 'net.layer.0.query', 'linear']"
    node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=scopes)
    old = helper.make_node("MatMul", ["val_2", "onnx::MatMul_7"], ["y"], name="/net/out/MatMul")
    graph = helper.make_graph(
        [node, old],
        "exported",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])],
        [
            numpy_helper.from_array(draw(16, 8), "val_1"),
            numpy_helper.from_array(draw(8, 4), "onnx::MatMul_7"),
        ],
    )
    opsets = [helper.make_opsetid("", 18)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    assert "in net.layer.0.query" in bw.load(model).value("val_2").node.loc
    found = schemes(model, batches(), {"ignore": ["net.layer.0.query.weight"]})
    assert found == {"net.layer.0.query": "float", "net.out": "dynamic_per_token"}


def test_values_keep_their_names_and_models_are_compared_by_them():
    graph = block()
    q = bw.quantize(graph, batches())
    found = compare(graph, q, batches(1))
    assert found.layers.keys() <= {node.name for node in graph.nodes}
    names = [name for node in q.graph.nodes for name in node.names]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    "precision, is_kept",
    [
        ("mixed_bf16:layer:layers.0.down_proj.weight=f32", True),
        ("mixed_bf16:layer:*q_proj*=f32", False),
    ],
)
def test_precision_patterns_match_weights(precision, is_kept):
    report = bw.convert(block(), precision).report
    assert (report.changed["matmul_2"] == "f32") is is_kept
    assert bw.compile(block(), precision=precision).run(batches()[0])["y"].shape == (8, 8)


@pytest.mark.parametrize(
    "precision, message",
    [
        ("mixed:layer:layers.0.donw_proj=f32", r"matches no layer.*'layers.0.down_proj'"),
        ("mixed:op:sofmax=f32", r"matches no op.*'softmax'"),
    ],
)
def test_precision_patterns_that_match_nothing_are_errors(precision, message):
    given = batches()
    for use in (
        lambda: bw.convert(block(), precision),
        lambda: bw.compile(block(), precision=precision),
        lambda: bw.quantize(block(), given, float_precision=precision),
    ):
        with pytest.raises(BitwrightError, match=message):
            use()


def test_a_policy_of_a_file_is_not_checked_against_changed_layers(tmp_path):
    """Its layers existed when it was written; passes may have merged them since."""
    policy = "mixed_bf16:layer:*down_proj*=f32"
    q = bw.quantize(block(), batches(), {"ignore": ["*down_proj"]}, float_precision=policy)
    q.save(tmp_path / "q.onnx")
    bw.compile(tmp_path / "q.onnx").run(batches()[0])


def test_the_example_of_the_documentation_matches(tmp_path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("yaml")
    text = (Path(__file__).parents[2] / "docs" / "quantization.md").read_text()
    path = tmp_path / "recipe.yaml"
    path.write_text(text.split("```yaml\n")[1].split("```")[0])

    class Mlp(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up_proj, self.down_proj = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

        def forward(self, x):
            return self.down_proj(torch.relu(self.up_proj(x)))

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = Mlp()

        def forward(self, x):
            return x + self.mlp(x)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed_tokens = torch.nn.Embedding(512, 16)
            self.layers = torch.nn.ModuleList(Layer() for _ in range(2))

        def forward(self, ids):
            x = self.embed_tokens(ids)
            for layer in self.layers:
                x = layer(x)
            return x

    class Llama(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model, self.lm_head = Model(), torch.nn.Linear(16, 512, bias=False)

        def forward(self, ids):
            return self.lm_head(self.model(ids))

    graph = bw.from_torch(Llama().eval(), (torch.zeros(2, 8, dtype=torch.long),))
    rng = np.random.default_rng(0)
    data = [{graph.inputs[0].name: rng.integers(0, 512, (2, 8))} for _ in range(8)]
    assert schemes(graph, data, path) == {
        "model.layers.0.mlp.up_proj": "float",
        "model.layers.0.mlp.down_proj": "float",
        "model.layers.1.mlp.up_proj": "dynamic_per_token",
        "model.layers.1.mlp.down_proj": "dynamic_per_token",
        "lm_head": "float",
    }
