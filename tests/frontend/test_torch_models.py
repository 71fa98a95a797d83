"""Small networks of every kind give the results of torch, at several sizes."""

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as nnf
from torch import nn
from torch_runs import assert_agree, check, eager, feeds

import bitwright as bw
from bitwright.frontend.parameters import load_parameters, parameters
from bitwright.ops.core.interpret import run


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def ops(graph):
    return {node.op for node in graph.nodes}


def assert_compiles(graph, module, args):
    """The passes for inference keep the results."""
    outputs = bw.compile(graph).run(feeds(graph, args))
    for name, expected in eager(module, *args).items():
        np.testing.assert_allclose(outputs[name], expected, rtol=1e-4, atol=1e-5)


def random_statistics(module):
    """Running statistics that differ from the defaults."""
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.running_mean.uniform_(-1, 1)
            part.running_var.uniform_(0.5, 2)
    return module.eval()


def test_perceptron():
    module = nn.Sequential(
        nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 3)
    ).eval()
    sizes = [(torch.randn(n, 6),) for n in (2, 1, 7)]
    graph = check(module, *sizes, dynamic_shapes=({0: torch.export.Dim("batch", max=32)},))
    assert str(graph.inputs[0].type) == "f32[batch, 6]"
    assert graph.inputs[0].shape[0] == bw.ir.symbol("batch", 32)
    assert [v.name for v in graph.parameters] == [n for n, _ in module.named_parameters()]
    assert_compiles(graph, module, sizes[2])


class Block(nn.Module):
    def __init__(self, channels, out, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride), nn.BatchNorm2d(out))

    def forward(self, x):
        y = nnf.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y))
        y += self.shortcut(x)
        return nnf.relu(y)


class ResidualNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 7, 2, 3), nn.BatchNorm2d(4), nn.ReLU(True))
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.stages = nn.Sequential(Block(4, 4, 1), Block(4, 8, 2))
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 8, 1), nn.Hardsigmoid())
        self.head = nn.Linear(8, 5)

    def forward(self, image):
        x = self.stages(self.pool(self.stem(image)))
        x = x * self.squeeze(x)
        return self.head(x.mean((2, 3)))


def test_residual_net():
    module = random_statistics(ResidualNet())
    sizes = [(torch.randn(*s),) for s in ((2, 3, 32, 40), (1, 3, 33, 37), (3, 3, 50, 24))]
    shapes = {"image": {0: "batch", 2: "height", 3: "width"}}
    graph = check(module, *sizes, dynamic_shapes=shapes)
    assert str(graph.inputs[0].type) == "f32[batch, 3, height, width]"
    trainable = {v.name: v.node.attrs["trainable"] for v in graph.parameters}
    assert trainable["stem.0.weight"] and not trainable["stem.1.running_mean"]
    assert_compiles(graph, module, sizes[1])
    other = random_statistics(ResidualNet())
    assert set(trainable) == set(other.state_dict())
    assert_agree(load_parameters(graph, other.state_dict()), other, sizes[2])


class HourGlass(nn.Module):
    """Down and upsampling with a skip, by interpolation and by transposed convolution."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding="same")
        self.up = nn.ConvTranspose2d(6, 4, 2, 2)
        self.norm = nn.GroupNorm(2, 8)
        self.last = nn.Conv2d(8, 2, 1)

    def forward(self, x):
        high = nnf.silu(self.first(x))
        low = nnf.mish(self.second(nnf.avg_pool2d(high, 2)))
        joined = torch.cat([high, self.up(low)], 1)
        mask = self.last(self.norm(joined))
        bigger = nnf.interpolate(mask, scale_factor=2, mode="bilinear", align_corners=False)
        return {"mask": mask, "bigger": bigger.sigmoid()}


def test_hour_glass():
    sizes = [(torch.randn(*s),) for s in ((2, 3, 8, 12), (1, 3, 14, 6))]
    shapes = {"x": {0: "batch", 2: "height", 3: "width"}}
    graph = check(HourGlass().eval(), *sizes, dynamic_shapes=shapes)
    assert [name for name, _ in graph.outputs] == ["mask", "bigger"]


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 16, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(
            16, 4, 32, batch_first=True, norm_first=True, activation="gelu"
        )

    def forward(self, tokens):
        hidden = tokens == 0
        x = self.layer(self.embed(tokens), src_key_padding_mask=hidden)
        kept = (~hidden).unsqueeze(-1).to(x.dtype)
        return nnf.normalize((x * kept).sum(1) / kept.sum(1).clamp(min=1), dim=-1)


def test_transformer_encoder():
    module = Encoder().eval()
    sizes = [(torch.randint(1, 20, s),) for s in ((2, 5), (1, 7), (4, 3))]
    sizes[1][0][0, 4:] = 0
    shapes = {"tokens": {0: "batch", 1: "seq"}}
    graph = check(module, *sizes, dynamic_shapes=shapes)
    assert {"attention", "layer_norm", "gather"} <= ops(graph)
    assert all(v.node.attrs["trainable"] for v in graph.parameters)
    assert_compiles(graph, module, sizes[1])


def test_frozen_transformer_is_not_traced_on_its_fused_path():
    module = nn.TransformerEncoderLayer(8, 2, 16).eval().requires_grad_(False)
    graph = check(module, (torch.randn(5, 2, 8),))
    assert not any(v.node.attrs["trainable"] for v in graph.parameters)


class Causal(nn.Module):
    """A small language model: positions, causal attention, and a head tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(17, 16)
        self.positions = nn.Embedding(32, 16)
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.project = nn.Linear(16, 16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU("tanh"), nn.Linear(32, 16))
        self.head = nn.Linear(16, 17, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        batch, length = ids.shape
        x = self.tokens(ids) + self.positions(torch.arange(length))
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (t.view(batch, length, 4, 4).transpose(1, 2) for t in (q, k, v))
        y = nnf.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).reshape(batch, length, 16))
        return self.head(x + self.mlp(x))


def test_causal_language_model_with_tied_weights(tmp_path):
    module = Causal().eval()
    sizes = [(torch.randint(0, 17, s),) for s in ((2, 5), (1, 9), (3, 2))]
    graph = check(module, *sizes, dynamic_shapes={"ids": {0: "batch", 1: "seq"}})
    assert [v.name for v in graph.parameters] == [n for n, _ in module.named_parameters()]
    (attention,) = (node for node in graph.nodes if node.op == "attention")
    assert attention.attrs["causal"]
    assert str(graph.outputs[0][1].type) == "f32[batch, seq, 17]"
    other = Causal().eval()
    torch.save(other.state_dict(), tmp_path / "model.pt")
    assert_agree(load_parameters(graph, other.state_dict()), other, sizes[1])
    assert_agree(load_parameters(graph, tmp_path / "model.pt"), other, sizes[1])
    untied = {k: v + (k == "head.weight") for k, v in other.state_dict().items()}
    with pytest.raises(bw.BitwrightError, match=r"'tokens.weight' and 'head.weight' are one"):
        load_parameters(graph, untied)


class Rotary(nn.Module):
    """RMS norms, rotation by complex numbers, grouped heads and a gated layer."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(16, eps=1e-6)
        self.q, self.kv = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        self.gate, self.up = nn.Linear(16, 24, bias=False), nn.Linear(16, 24, bias=False)
        self.down = nn.Linear(24, 16, bias=False)
        angles = torch.outer(torch.arange(32.0), 1.0 / 100 ** torch.arange(0, 1, 0.5))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles), False)

    def turn(self, x):
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * self.turns[: x.shape[2]]).flatten(-2)

    def forward(self, x):
        y = self.norm(x)
        q = self.q(y).unflatten(-1, (4, 4)).transpose(1, 2)
        k, v = self.kv(y).unflatten(-1, (2, 2, 4)).permute(2, 0, 3, 1, 4)
        q, k = self.turn(q), self.turn(k)
        y = nnf.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + y.transpose(1, 2).flatten(2)
        return x + self.down(nnf.silu(self.gate(x)) * self.up(x))


def test_rotary_decoder():
    module = Rotary().eval()
    sizes = [(torch.randn(*s),) for s in ((2, 5, 16), (1, 8, 16))]
    graph = check(module, *sizes, dynamic_shapes={"x": {0: "batch", 1: "seq"}})
    assert "rms_norm" in ops(graph)
    assert "turns" not in parameters(graph), "a buffer that is not saved is a constant"
    load_parameters(graph, module.state_dict())


class Tagger(nn.Module):
    """Recurrent layers of each kind, stacked and in both directions."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.lstm = nn.LSTM(5, 4, num_layers=2, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(8, 3, bidirectional=True, batch_first=True)
        self.rnn = nn.RNN(6, 4, bias=False, nonlinearity="relu")
        self.cell = nn.LSTMCell(4, 2)

    def forward(self, tokens):
        y, (h, c) = self.lstm(self.embed(tokens))
        z, last = self.gru(y)
        y, _ = self.rnn(z.transpose(0, 1), z.new_zeros(1, z.shape[0], 4))
        return {"y": y.transpose(0, 1), "h": h, "c": c, "last": last, "cell": self.cell(y[-1])}


def test_recurrent_layers():
    sizes = [(torch.randint(0, 11, s),) for s in ((2, 5), (1, 7), (4, 2))]
    graph = check(Tagger().eval(), *sizes, dynamic_shapes={"tokens": {0: "batch", 1: "seq"}})
    assert {"lstm", "gru", "rnn"} <= ops(graph)
    assert sum(node.op == "lstm" for node in graph.nodes) == 2


class Cached(nn.Module):
    """Keys and values are written to a cache that persists across calls."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(4, 12)
        self.register_buffer("keys", torch.zeros(1, 8, 4))
        self.register_buffer("values", torch.zeros(1, 8, 4), persistent=False)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x, position):
        q, k, v = self.qkv(x).chunk(3, -1)
        self.keys[:, position] = k
        self.values.index_copy_(1, position, v)
        seen = torch.arange(8) <= position
        scores = (q @ self.keys.mT * self.scale).masked_fill(~seen, float("-inf"))
        return scores.softmax(-1) @ self.values


def test_buffers_that_change_are_states():
    module = Cached().eval()
    graph = bw.from_torch(module, (torch.randn(1, 1, 4), torch.tensor([0])))
    assert {v.name for v in graph.states} == {"keys", "values"}
    assert [s.name for s, _ in graph.updates] == ["keys", "values"]
    assert not graph.value("scale").node.attrs["trainable"]
    states = {}
    for step in range(3):
        assert_agree(graph, module, (torch.randn(1, 1, 4), torch.tensor([step])), states=states)
    np.testing.assert_allclose(states["keys"], module.keys, rtol=1e-5)
    warm = load_parameters(graph, module.state_dict())
    x = np.zeros((1, 1, 4), np.float32)
    assert "keys" not in parameters(warm)
    assert run(warm, {"x": x, "position": np.array([3])})["output"].shape == (1, 1, 4)
    np.testing.assert_array_equal(warm.value("keys").node.attrs["value"], module.keys)


def test_training_mode_keeps_batch_statistics_as_states():
    module = nn.Sequential(nn.Conv1d(2, 3, 3), nn.BatchNorm1d(3)).train()
    graph = bw.from_torch(module, (torch.randn(4, 2, 6),), dynamic_shapes=({0: "batch"},))
    names = ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert [s.name for s, _ in graph.updates] == names
    states = {}
    for batch in (5, 3):
        assert_agree(graph, module, (torch.randn(batch, 2, 6),), states=states)
    for name in names:
        np.testing.assert_allclose(states[name], module.state_dict()[name], rtol=1e-5)
