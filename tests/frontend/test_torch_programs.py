"""Names, sizes, control flow and data-dependent shapes of imported programs; errors."""

import json
import math
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch_runs import assert_agree, check

import bitwright as bw
from bitwright.errors import ImportModelError, UnsupportedError
from bitwright.frontend.parameters import load_parameters
from bitwright.ops.core.interpret import run
from bitwright.warn import BitwrightWarning, forget


def shown(values):
    return [f"{v.name}: {v.type}" for v in values]


@dataclass
class Result:
    logits: torch.Tensor
    states: tuple[torch.Tensor, ...]


torch.export.register_dataclass(Result, serialized_type_name="tests.Result")


class Named(nn.Module):
    """Nested inputs and outputs, tied and unused parameters, constants of every kind."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.weight
        self.unused = nn.Linear(2, 2)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("mask", torch.ones(4))
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.plain = torch.full((4,), 2.0)

    def forward(self, x, batch, mask, *rest, scale=2.0, flag=True):
        y = self.tied(x) @ self.weight + batch["a"] * self.table + batch["b"][0]
        y = (y + rest[0] + self.frozen) * self.mask * self.plain * mask
        batch["a"].mul_(2)
        return Result(y * scale if flag else y, (y[:, 1:], y.sum()))


def named_example(n, s):
    nested = {"a": torch.randn(n, s, 4), "b": [torch.randn(4)]}
    return torch.randn(n, s, 4), nested, torch.rand(4), torch.randn(4)


def test_names_and_sharing():
    module, sizes = Named(), {0: "batch", 1: "seq"}
    shapes = {"x": sizes, "batch": {"a": sizes, "b": [None]}, "mask": None, "rest": (None,)}
    example = named_example(2, 3)
    graph = bw.from_torch(module, example, dynamic_shapes=shapes, name="tiny")
    assert graph.name == "tiny"
    assert shown(graph.inputs) == [
        "x: f32[batch, seq, 4]",
        "batch.a: f32[batch, seq, 4]",
        "batch.b.0: f32[4]",
        "mask.input: f32[4]",  # the buffer keeps the name that both have
        "rest.0: f32[4]",
    ]
    assert [f"{name}: {v.type}" for name, v in graph.outputs] == [
        "logits: f32[batch, seq, 4]",
        "states.0: f32[batch, seq-1, 4]",
        "states.1: f32[]",
        "batch.a.updated: f32[batch, seq, 4]",
    ]
    trainable = {v.name: v.node.attrs["trainable"] for v in graph.parameters}
    assert trainable == {
        "weight": True,
        "frozen": False,
        "unused.weight": True,
        "unused.bias": True,
        "mask": False,
    }
    module.weight.data[0, 0] = 7.0
    assert graph.value("weight").node.attrs["value"][0, 0] == 7.0, "the memory is shared"
    load_parameters(graph, module.state_dict())
    args = named_example(4, 6)
    feeds = dict(zip((v.name for v in graph.inputs), _arrays(args), strict=True))
    found = run(graph, feeds)
    expected = module(*args)
    np.testing.assert_allclose(found["logits"], expected.logits.detach(), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(found["batch.a.updated"], args[1]["a"])


def _arrays(args):
    return [leaf.clone().numpy() for leaf in torch.utils._pytree.tree_leaves(args)]


class Sized(nn.Module):
    def forward(self, x, y):
        n = x.shape[0]
        halves = nn.functional.avg_pool1d(x.T, 2).T
        more = torch.zeros(math.floor(n * 1.5), 2)
        return halves, x.reshape(2, -1, 3), y + n, n // 2, n / 4, more


def test_sizes_are_expressions():
    half = torch.export.Dim("half", min=1, max=50)
    shapes = {"x": {0: 2 * half}, "y": {0: torch.export.Dim.AUTO}}
    module = Sized()
    graph = bw.from_torch(module, (torch.randn(6, 3), torch.randn(4)), dynamic_shapes=shapes)
    assert shown(graph.inputs)[1] == "y: f32[y.0]"
    size = str(graph.inputs[0].shape[0])
    assert size == "2*half"
    assert str(graph.outputs[-1][1].shape[0]) == size.replace("2", "3", 1)
    for n in (2, 10):
        assert_agree(graph, module, (torch.randn(n, 3), torch.randn(n)))


class Chooses(nn.Module):
    def forward(self, x, y):
        if x.shape[0] > 4 and x.shape[0] % 3 == 0 and y.shape[0] < x.shape[0]:
            return x + 1
        return x - 1


class Fixes(nn.Module):
    def forward(self, x):
        return x.sum() + torch.zeros(int(x.shape[0] * 1.5))


def test_branches_on_sizes_are_reported():
    forget()
    shapes = {"x": {0: "n"}, "y": {0: "m"}}
    with pytest.warns(BitwrightWarning, match="'Chooses': the graph is for sizes where n > 4"):
        graph = bw.from_torch(Chooses(), (torch.ones(6), torch.ones(4)), dynamic_shapes=shapes)
    assert json.loads(graph.meta["conditions"]) == ["n > 4", "n % 3 == 0", "m < n"]
    with pytest.raises(ImportModelError, match=r"fixes a size: math.trunc\(1.5.*n.* == 9"):
        bw.from_torch(Fixes(), (torch.ones(6),), dynamic_shapes={"x": {0: "n"}})


def test_low_precision_parameters_share_memory():
    module = nn.Linear(3, 2).bfloat16()
    graph = bw.from_torch(module, (torch.randn(2, 3).bfloat16(),))
    weight = graph.value("weight").node.attrs["value"]
    module.weight.data.fill_(0.5)
    assert weight.dtype.name == "bfloat16" and (weight.astype(np.float32) == 0.5).all()
    assert_agree(graph, module, (torch.randn(2, 3).bfloat16(),), tolerance=1e-2)


class Numbers(nn.Module):
    def forward(self, x, count, mask=None, *, factor=2, more=None):
        x = x[:count] * factor if mask is None else x
        return {"x": x, "more": more["q"] + 1, "nothing": None, "factor": factor}


def test_numbers_and_none_among_inputs_and_outputs():
    shapes = {"x": None, "count": torch.export.Dim.DYNAMIC, "mask": None, "more": {"q": None}}
    args, more = (torch.ones(6, 3), 4, None), {"more": {"q": torch.ones(2)}}
    graph = bw.from_torch(Numbers(), args, more, dynamic_shapes=shapes)
    assert shown(graph.inputs) == ["x: f32[6, 3]", "count: i64[]", "more.q: f32[2]"]
    ones = np.ones((6, 3), np.float32)
    found = run(graph, {"x": ones, "count": np.array(2), "more.q": ones[0, :2]})
    assert list(found) == ["x", "more", "factor"]
    assert found["x"].shape == (2, 3) and found["factor"] == 2
    assert json.loads(graph.meta["conditions"]) == ["count >= 0 and count <= 6"]


class DataDependent(nn.Module):
    def forward(self, x):
        places = torch.nonzero(x > 0)
        chosen = x[x > 0]
        count = (x > 0).sum().item()
        torch._check(count <= x.numel())
        more = torch.cat([chosen, chosen]).reshape(2, -1)
        table = chosen.reshape(-1, 1).expand(-1, 3)
        return {
            "places": places,
            "chosen": chosen * 2,
            "count": places.shape[0],
            "range": torch.arange(count),
            "head": x.flatten()[:count],
            "zeros": torch.zeros(count, 2),
            "more": more,
            "table": table,
            "below": torch.masked_select(x, x < 0),
        }


def test_data_dependent_shapes():
    sizes = [(torch.randn(n, 4),) for n in (3, 5)]
    check(DataDependent(), *sizes, dynamic_shapes={"x": {0: "batch"}})


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = torch.cond(x.sum() > 0, lambda x: self.linear(x) * x.shape[0], torch.sin, (x,))
        with torch.no_grad():
            z = y * 2
        return y, z, torch.cond(x.shape[0] > 4, torch.cos, torch.sin, (x,))


def test_conditions():
    sizes = [(torch.ones(3, 4),), (-torch.ones(5, 4),), (torch.ones(7, 4),)]
    graph = check(Branches(), *sizes, dynamic_shapes={"x": {0: "batch"}})
    assert sum(node.op == "if" for node in graph.nodes) == 2


class Repeats(nn.Module):
    def forward(self, x):
        from torch._higher_order_ops.scan import scan
        from torch._higher_order_ops.while_loop import while_loop

        steps = torch.tensor(0)
        _, y = while_loop(lambda i, y: i < 5, lambda i, y: (i + 1, y * 1.5 + i), (steps, x))
        last, rows = scan(lambda c, row: (c * 0.5 + row, c + row.sin()), x[0] * 0, x)
        return y, last, rows


def test_loops():
    sizes = [(torch.randn(n, 4),) for n in (3, 6)]
    graph = check(Repeats(), *sizes, dynamic_shapes={"x": {0: "batch"}})
    assert {"loop", "scan"} <= {node.op for node in graph.nodes}


def test_exported_program():
    module = nn.Sequential(nn.Linear(3, 2), nn.Tanh())
    program = torch.export.export(
        module, (torch.randn(2, 3),), dynamic_shapes=({0: torch.export.Dim("n", max=9)},)
    )
    graph = bw.from_torch(program)
    assert shown(graph.inputs) == ["input: f32[input.0, 3]"]
    assert_agree(graph, module, (torch.randn(5, 3),))


class Random(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop, self.rnn = nn.Dropout(0.25), nn.GRU(4, 4, num_layers=2, dropout=0.5)

    def forward(self, x):
        noise = torch.rand_like(x) + torch.randn(x.shape[0], 1) * 0
        return {"dropped": self.drop(x), "noise": noise, "rnn": self.rnn(x[None])[0]}


def test_random_numbers_in_training_mode():
    graph = bw.from_torch(Random(), (torch.ones(3, 4),), dynamic_shapes={"x": {0: "batch"}})
    x = np.ones((5000, 4), np.float32)
    found = run(graph, {"x": x})
    zero = found["dropped"] == 0
    assert abs(zero.mean() - 0.25) < 0.03
    np.testing.assert_allclose(found["dropped"][~zero], 4 / 3, rtol=1e-6)
    assert found["noise"].min() >= 0 and found["noise"].max() <= 1
    assert abs(found["noise"].mean() - 0.5) < 0.03
    assert len(np.unique(found["rnn"].round(5))) > 16


# errors


class Unsupported(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        y = torch.histc(x) + torch.histc(x + 1)
        return y, self.drop(torch.lgamma(x)), torch.linalg.qr(x)


def test_every_unsupported_op_is_named():
    with pytest.raises(UnsupportedError) as caught:
        bw.from_torch(Unsupported(), (torch.randn(3, 3),))
    text = str(caught.value)
    assert "module 'Unsupported': 3 uses of PyTorch ops cannot be imported" in text
    assert "aten.histc.default (node 'histc', test_torch_programs.py line" in text
    assert "2 times, first" in text
    assert "aten.lgamma.default" in text and "linalg_qr" in text


class Refused(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.LSTM(3, 3, proj_size=2)

    def forward(self, x):
        y, _ = self.inner(x)
        return y, nn.functional.rrelu(x, training=True) + 1, x.view(torch.int32)


def test_reasons_are_listed_together():
    with pytest.raises(UnsupportedError) as caught:
        bw.from_torch(Refused(), (torch.randn(2, 1, 3),))
    text = str(caught.value)
    assert "3 uses of PyTorch ops cannot be imported" in text
    assert "aten.lstm.input (node 'lstm' in 'inner', test_torch_programs.py line" in text
    assert "a projection of the hidden state (proj_size)" in text
    assert "call module.eval() first" in text
    assert "it reads the bits of f32 as i32" in text


@pytest.mark.parametrize(
    "module, args, shapes, message",
    [
        (lambda x: x, (torch.ones(2),), None, "takes a module; expected torch.nn.Module"),
        (nn.ReLU(), torch.ones(2), None, "example_args are not a tuple"),
        (nn.ReLU(), (torch.ones(2), torch.ones(2)), None, "cannot trace the module"),
        (nn.Linear(3, 2), (torch.ones(2, 3),), ({1: "width"},), "specialized it to be a constant"),
        (
            nn.Flatten(0),
            (torch.ones(2, 3),),
            ({0: torch.export.Dim("n", min=0, max=1)},),
            "cannot trace the module",
        ),
    ],
)
def test_bad_calls(module, args, shapes, message):
    with pytest.raises(ImportModelError, match=message):
        bw.from_torch(module, args, dynamic_shapes=shapes)


def test_torch_is_imported_only_when_it_is_used():
    code = (
        "import sys, bitwright as bw, numpy as np\n"
        "from bitwright.frontend.parameters import load_parameters\n"
        "bw.from_torch\n"
        "assert 'torch' not in sys.modules\n"
        "sys.modules['torch'] = None\n"
        "try: bw.from_torch(None, ())\n"
        "except bw.BitwrightError as error: print(error)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert "PyTorch cannot be imported" in result.stdout
    assert "pip install bitwright[torch]" in result.stdout
