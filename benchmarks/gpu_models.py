"""Models and sample graphs for the GPU benchmarks, with random weights.

`model(name, batch)` returns a PyTorch module and its inputs: transformer encoders of the sizes of
MiniLM and BERT, and
ResNet-50. `lowered` brings one through `bw.from_torch`, `bw.quantize` and the passes of target
"cuda".
`sample_graphs` are small graphs that use every kernel family.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import bitwright as bw
from bitwright.backends.gpu.lowering import registered
from bitwright.backends.gpu.lowering.context import LOWERINGS
from bitwright.backends.gpu.passes import BEFORE_PRECISION, GPU, after_precision
from bitwright.ir.dtype import dtype
from bitwright.ir.graph import Graph
from bitwright.ir.types import TensorType
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.registry import all_ops, get
from bitwright.passes.manager import History, run_passes
from bitwright.passes.precision.apply import apply_precision
from bitwright.passes.precision.policy import policy
from bitwright.passes.simplify.canonicalize import canonicalize
from bitwright.pipeline import INFERENCE

assert registered
TINY = {"minilm": (32, 4, 64, 2, 100, 16), "bert": (48, 3, 96, 2, 100, 16)}
FULL = {"minilm": (384, 12, 1536, 6, 30522, 128), "bert": (768, 12, 3072, 12, 30522, 128)}


class Block(nn.Module):
    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Any) -> Any:
        batch, length, width = x.shape
        parts = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        x = self.norm1(x + self.out(found.reshape(batch, length, width)))
        return self.norm2(x + self.down(functional.gelu(self.up(x))))


class Encoder(nn.Module):
    def __init__(self, width: int, heads: int, inner: int, layers: int, words: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(words, width), nn.Embedding(512, width)
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Block(width, heads, inner) for _ in range(layers))

    def forward(self, ids: Any) -> Any:
        x = self.norm(self.embed(ids) + self.place.weight[: ids.shape[1]])
        for block in self.blocks:
            x = block(x)
        return x.mean(1)


def _conv(inputs: int, outputs: int, size: int, stride: int = 1, pad: int = 0) -> list[nn.Module]:
    return [
        nn.Conv2d(inputs, outputs, size, stride, pad, bias=False),
        nn.BatchNorm2d(outputs),
    ]


class ResNet(nn.Module):
    """ResNet-50, or with `tiny` one block per stage and an eighth of the channels."""

    def __init__(self, tiny: bool = False) -> None:
        super().__init__()
        scale = 8 if tiny else 1
        width = 64 // scale
        self.stem = nn.Sequential(*_conv(3, width, 7, 2, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.long, self.short = nn.ModuleList(), nn.ModuleList()
        stages = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
        inputs = width
        for wide, count, first in stages[: 2 if tiny else 4]:
            middle, outputs = wide // scale, 4 * wide // scale
            for number in range(1 if tiny else count):
                stride = first if number == 0 else 1
                parts = [*_conv(inputs, middle, 1), nn.ReLU()]
                parts += [*_conv(middle, middle, 3, stride, 1), nn.ReLU()]
                self.long.append(nn.Sequential(*parts, *_conv(middle, outputs, 1)))
                same = stride == 1 and inputs == outputs
                project = nn.Sequential(*_conv(inputs, outputs, 1, stride))
                self.short.append(nn.Identity() if same else project)
                inputs = outputs
        self.head = nn.Linear(inputs, 10 if tiny else 1000)

    def forward(self, x: Any) -> Any:
        x = self.stem(x)
        for long, short in zip(self.long, self.short, strict=True):
            x = functional.relu(long(x) + short(x))
        return self.head(x.mean((2, 3)))


def model(name: str, batch: int, tiny: bool = False) -> tuple[Any, tuple[Any, ...]]:
    """A module on the CPU and its inputs."""
    torch.manual_seed(0)
    if name == "resnet50":
        side = 32 if tiny else 224
        return ResNet(tiny).eval(), (torch.randn(batch, 3, side, side),)
    width, heads, inner, layers, words, length = (TINY if tiny else FULL)[name]
    module = Encoder(width, heads, inner, layers, words).eval()
    return module, (torch.randint(0, words, (batch, length)),)


def graph_of(
    name: str, batch: int, recipe: str = "", tiny: bool = False
) -> tuple[Any, dict[str, np.ndarray[Any, Any]]]:
    """A (quantized) graph and its inputs as arrays."""
    module, inputs = model(name, batch, tiny)
    graph: Any = bw.from_torch(module, inputs)
    names = [value.name for value in graph.inputs]
    feeds = {n: x.numpy() for n, x in zip(names, inputs, strict=True)}
    if recipe:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph = bw.quantize(graph, data=[feeds], recipe=recipe)
    return graph, feeds


def lowered(name: str, batch: int, recipe: str, precision: str, tiny: bool = False) -> Graph:
    """The graph of a model after all passes of target "cuda"; needs no GPU."""
    graph = graph_of(name, batch, recipe, tiny)[0]
    return after_passes(getattr(graph, "graph", graph), precision)


def after_passes(graph: Graph, precision: str = "") -> Graph:
    """A graph after all passes of target "cuda"."""
    history = History()
    graph = run_passes(graph, INFERENCE, history)
    if precision:
        graph = run_passes(graph, BEFORE_PRECISION, history)
        graph = apply_precision(graph, policy(precision))
        after = after_precision(policy(precision))
        graph = run_passes(graph, (canonicalize, *after), history)
    return run_passes(graph, GPU, history)


def sample_graphs() -> Iterator[Graph]:
    """Small graphs: the models, every op that has a kernel of its own, all scalar functions."""
    for name, recipe in (("minilm", ""), ("minilm", "int8"), ("resnet50", "int8")):
        yield lowered(name, 2, recipe, "mixed_bf16", tiny=True)
    for op in sorted(LOWERINGS.keys() & all_ops().keys()):
        if get(op).scalar is None and get(op).samples():
            yield _sample_graph(op)
    yield _all_functions()


def _sample_graph(op: str) -> Graph:
    case = get(op).samples()[0]
    b = Builder(op)
    operands = []
    for number, array in enumerate(case.inputs):
        held = None if array is None else np.asarray(array)
        operands.append(
            None
            if held is None
            else b.input(f"x{number}", TensorType(dtype(held.dtype), held.shape))
        )
    node = b.node(op, operands, case.attrs, [])
    return after_passes(b.build(**{f"y{n}": v for n, v in enumerate(node.outputs)}))


def _all_functions() -> Graph:
    """The sum of all functions of one f32, in one region."""
    b = Builder("functions")
    x = b.input("x", "f32[1000]")
    total = x
    for name, op in all_ops().items():
        if op.scalar is None or len(op.operands) != 1 or name.startswith(("bitwise", "not", "is_")):
            continue
        total = b.add(total, getattr(b, name)(x))
    return after_passes(b.build(y=total))
