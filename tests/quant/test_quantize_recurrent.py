"""Quantized recurrent layers of PyTorch, compared with PyTorch, here and in ONNX Runtime."""

import numpy as np
import pytest

import bitwright as bw

torch = pytest.importorskip("torch")
onnxruntime = pytest.importorskip("onnxruntime")


class Tagger(torch.nn.Module):
    """Two layers in both directions and a head over every step."""

    def __init__(self, kind, hidden=24):
        super().__init__()
        layer = getattr(torch.nn, kind)
        self.layers = layer(12, hidden, 2, bidirectional=True, batch_first=True)
        self.head = torch.nn.Linear(2 * hidden, 5)

    def forward(self, x):
        return self.head(self.layers(x)[0])


def sqnr(exact, found):
    return 10 * np.log10((exact**2).sum() / ((exact - found) ** 2).sum())


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("recipe", ["int8", {"schemes": {"*": "dynamic_per_tensor"}}, "w8"])
def test_layers_of_torch(kind, recipe, tmp_path):
    torch.manual_seed(0)
    module, rng = Tagger(kind).eval(), np.random.default_rng(0)
    graph = bw.from_torch(module, (torch.zeros(2, 40, 12),))
    name = graph.inputs[0].name
    data = [{name: rng.normal(size=(2, 40, 12)).astype(np.float32)} for _ in range(5)]
    q = bw.quantize(graph, data[:4], recipe)
    rows = [layer for layer in q.report.layers if layer.op == kind.lower()]
    assert len(rows) == 2 and all(layer.reason and layer.multiply_adds for layer in rows)
    assert q.report.int8_mac_fraction == (0 if recipe == "w8" else 1)
    assert q.report.quantized_bytes < 0.45 * q.report.float_bytes
    with torch.no_grad():
        exact = module(torch.from_numpy(data[4][name])).numpy()
    (found,) = bw.compile(q).run(data[4]).values()
    q.save(tmp_path / "q.onnx")
    (theirs,) = onnxruntime.InferenceSession(tmp_path / "q.onnx").run(None, data[4])
    assert sqnr(exact, found) > 30 and sqnr(exact, theirs) > 30
