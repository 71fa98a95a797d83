"""Models that PyTorch exports after QAT: QDQ pairs with float weights."""

import io
import warnings

import numpy as np
import onnx
import onnxruntime
import torch
from torch import nn

import bitwright as bw
from bitwright.passes.lower_integer.lower_integer import lower_integer
from bitwright.passes.manager import run_passes
from bitwright.pipeline import INFERENCE


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8 * 36, 5)

    def forward(self, x):
        x = torch.fake_quantize_per_tensor_affine(x, 0.02, 128, 0, 255)
        steps, zeros = torch.full((8,), 0.002), torch.zeros(8, dtype=torch.int32)
        w = torch.fake_quantize_per_channel_affine(self.conv.weight, steps, zeros, 0, -128, 127)
        y = torch.relu(nn.functional.conv2d(x, w, self.conv.bias, padding=1))
        y = torch.fake_quantize_per_tensor_affine(y, 0.015, -128, -128, 127).flatten(1)
        w = torch.fake_quantize_per_tensor_affine(self.last.weight, 0.0005, 0, -128, 127)
        return nn.functional.linear(y, w, self.last.bias)


def test_fake_quantization_becomes_products_of_quantized_values():
    file, x = io.BytesIO(), torch.randn(4, 3, 6, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the legacy exporter writes QDQ pairs
        torch.onnx.export(Layer().eval(), (x,), file, dynamo=False, opset_version=18)
    graph = bw.load(onnx.load_from_string(file.getvalue()))
    lowered = run_passes(run_passes(graph, INFERENCE), (lower_integer,))
    names = [node.op for node in lowered.nodes]
    assert {"integer_conv", "integer_matmul"} <= set(names)
    assert "conv" not in names and "matmul" not in names
    feeds = {graph.inputs[0].name: x.numpy()}
    (theirs,) = onnxruntime.InferenceSession(file.getvalue()).run(None, feeds)
    (ours,) = bw.compile(graph).run(feeds).values()
    np.testing.assert_allclose(ours, theirs, atol=0.02)
