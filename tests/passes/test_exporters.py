"""Composites are recognized in what exporters write, and results stay those of ONNX Runtime."""

import io
from collections import Counter

import numpy as np
import pytest

import bitwright as bw
from bitwright.ops.core.interpret import run
from bitwright.passes.manager import run_passes
from bitwright.pipeline import SIMPLIFY

torch = pytest.importorskip("torch")
ort = pytest.importorskip("onnxruntime")
nn = torch.nn


class LayerNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)

    def forward(self, x):
        return self.norm(x)


class RmsNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.g = nn.Parameter(torch.randn(8))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.g


class Softmax(nn.Module):
    def forward(self, x):
        e = torch.exp(x - x.amax(-1, keepdim=True))
        return e / e.sum(-1, keepdim=True)


class SiLU(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(x)


def heads(x):
    return x.view(x.shape[0], x.shape[1], 2, 4).transpose(1, 2)


class Attention(nn.Module):
    """Attention written out, as model code has it."""

    def __init__(self, causal=False, scale_query=False):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.causal, self.scale_query = causal, scale_query

    def forward(self, x):
        q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
        scores = (q * 0.5) @ k.transpose(2, 3) if self.scale_query else q @ k.transpose(2, 3) / 2
        if self.causal:
            size = x.shape[1]
            scores = scores + torch.triu(torch.full((size, size), -1e9), 1)
        y = torch.softmax(scores, -1) @ v
        return y.transpose(1, 2).reshape(x.shape)


class FusedAttention(Attention):
    def forward(self, x):
        q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return y.transpose(1, 2).reshape(x.shape)


class RotaryHalves(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("frequencies", 1.0 / 100 ** (torch.arange(0, 4, 2) / 4))

    def forward(self, x):
        q = heads(x)
        angles = torch.arange(x.shape[1]).float()[:, None] * self.frequencies[None]
        table = torch.cat((angles, angles), -1)
        cos, sin = table.cos()[None, None], table.sin()[None, None]
        transposed = torch.cat((-q[..., 2:], q[..., :2]), -1)
        return q * cos + transposed * sin


CASES = [
    ("gelu", nn.GELU(), {"gelu": 1}),
    ("gelu-tanh", nn.GELU(approximate="tanh"), {"gelu": 1}),
    ("silu", SiLU(), {"silu": 1}),
    ("hard-swish", nn.Hardswish(), {"hard_swish": 1}),
    ("mish", nn.Mish(), {"mish": 1}),
    ("softmax", Softmax(), {"softmax": 1}),
    ("layer-norm", LayerNorm(), {"layer_norm": 1}),
    ("rms-norm", RmsNorm(), {"rms_norm": 1}),
    ("attention", Attention(), {"attention": 1}),
    ("attention-scaled-query", Attention(scale_query=True), {"attention": 1}),
    ("attention-causal", Attention(causal=True), {"attention": 1}),
    ("attention-fused", FusedAttention(), {"attention": 1}),
    ("attention-fused-causal", FusedAttention(causal=True), {"attention": 1}),
    ("rotary", RotaryHalves(), {"rotary": 1}),
]
# opset 11 has neither Gelu nor LayerNormalization: the exporter writes both out
EXPORTERS = {"torchscript-11": 11, "torchscript-17": 17, "dynamo-18": 18}
NOT_EXPORTED = {
    ("attention-fused", "torchscript-11"),
    ("attention-fused-causal", "torchscript-11"),
    ("hard-swish", "torchscript-11"),
    ("attention-causal", "torchscript-11"),
}


def export(module, exporter):
    x = torch.randn(2, 5, 8)
    file = io.BytesIO()
    if exporter.startswith("dynamo"):
        sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("seq")}
        program = torch.onnx.export(
            module, (x,), dynamo=True, opset_version=18, dynamic_shapes=(sizes,), verbose=False
        )
        program.save(file)
    else:
        torch.onnx.export(
            module, (x,), file, dynamo=False, opset_version=EXPORTERS[exporter],
            input_names=["x"], dynamic_axes={"x": {0: "batch", 1: "seq"}},
        )  # fmt: skip
    return file.getvalue()


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("name, module, wanted", CASES, ids=[c[0] for c in CASES])
@pytest.mark.filterwarnings("ignore")
def test_composite_is_recognized(name, module, wanted, exporter):
    if (name, exporter) in NOT_EXPORTED:
        pytest.skip("this exporter cannot write this module at this opset")
    torch.manual_seed(0)
    data = export(module.eval(), exporter)
    graph = bw.load(data)
    simple = run_passes(graph, SIMPLIFY)
    counts = Counter(node.op for node in simple.nodes)
    assert wanted.items() <= counts.items(), str(simple)
    leftovers = {"erf", "tanh", "sigmoid", "exp", "sqrt", "rsqrt", "reduce_mean", "clip"}
    assert not leftovers & set(counts), str(simple)
    session = ort.InferenceSession(data)
    for shape in ((2, 5, 8), (1, 1, 8), (3, 7, 8)):
        x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        feeds = {simple.inputs[0].name: x}
        (expected,), (found,) = session.run(None, feeds), run(simple, feeds).values()
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
