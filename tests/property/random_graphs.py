"""Random small graphs with random inputs, from a seed.

    graph, feeds = random_graph(seed)          # feeds: one dict of arrays per size of the batch

Values stay near 1, so results can be compared with a tolerance. Discontinuous ops (comparisons,
rounding, ranking, integers) read exact values only: inputs, constants, and movements or comparisons
of exact values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bitwright.errors import InferenceError, RunError
from bitwright.ir.dim import Dim, evaluate, symbol
from bitwright.ir.graph import Graph, Value
from bitwright.ops.core.builder import Builder

SIZES = (1, 1, 2, 3, 4, 5, 7, 8, 16, 17, 33)
BATCHES = (1, 2, 3, 5, 0)
LARGEST = 1 << 13
SMOOTH = ("relu", "tanh", "sigmoid", "neg", "abs", "erf", "sin", "cos", "softsign", "silu", "gelu")
BINARY = ("add", "sub", "mul", "maximum", "minimum")
REDUCTIONS = ("reduce_sum", "reduce_mean", "reduce_max", "reduce_min")
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
Array = np.ndarray[Any, Any]


class Generator:
    """Grows one graph by steps that a random generator chooses."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.b = Builder(f"random{seed}")
        self.batch = symbol("n")
        self.values: list[Value] = []
        self.exact: set[Value] = set()
        for number in range(self.random.integers(1, 4)):
            self._enter(f"x{number}")
        steps = self.steps()
        for _ in range(self.random.integers(2, 10)):
            step = steps[self.random.integers(len(steps))]
            try:
                made = step()
            except InferenceError:
                continue
            if made is not None:
                self.values.append(made)

    def steps(self) -> list[Callable[[], Value | None]]:
        """The steps to choose from, repeated by their frequency."""
        return [
            *[self.unary, self.binary, self.binary_constant] * 3,
            *[self.matmul, self.product, self.reduce, self.normalize, self.move, self.move] * 2,
            *[self.conv, self.pool, self.where, self.convert, self.rank, self.running],
        ]

    # choices

    def pick(self, *options: Any) -> Any:
        return options[self.random.integers(len(options))]

    def chance(self, share: float) -> bool:
        return bool(self.random.random() < share)

    def floats(self, rank: int = 0, exact: bool = False) -> Value | None:
        """A value of f32 with at least this many axes."""
        found = [
            v
            for v in self.values
            if v.dtype.name == "f32" and v.rank >= rank and (not exact or v in self.exact)
        ]
        return found[self.random.integers(len(found))] if found else None

    def array(self, shape: tuple[int, ...], scale: float = 1.0) -> Array:
        return (self.random.uniform(-1, 1, shape) * scale).astype(np.float32)

    def _enter(self, name: str) -> None:
        rank = self.random.integers(0, 5)
        shape: list[Any] = [self.pick(*SIZES) for _ in range(rank)]
        if rank and self.chance(0.6):
            shape[0] = self.batch
        if rank and self.chance(0.04):
            shape[self.random.integers(rank)] = 0
        while _size(shape) > LARGEST:
            shape[-1] = max(1, shape[-1] // 2) if not isinstance(shape[-1], Dim) else 1
            shape[1:] = [max(1, s // 2) for s in shape[1:]]
        value = self.b.input(name, f"f32[{', '.join(map(str, shape))}]")
        self.values.append(value)
        self.exact.add(value)

    def kept(self, made: Value, *sources: Value) -> Value:
        """The result, marked exact if all its sources are."""
        if all(source in self.exact for source in sources):
            self.exact.add(made)
        return made

    def spread(self, shape: tuple[Any, ...]) -> tuple[int, ...]:
        """The shape of a constant that broadcasts to this one."""
        kept = [1 if isinstance(s, Dim) or self.chance(0.3) else s for s in shape]
        return tuple(kept[self.random.integers(len(kept) + 1) :])

    # steps

    def unary(self) -> Value | None:
        x = self.floats()
        return None if x is None else self.b.op(self.pick(*SMOOTH), x)

    def binary(self) -> Value | None:
        x = self.floats()
        other = self.floats()
        made: Value = self.b.op(self.pick(*BINARY), *self.pick((x, other), (other, x)))
        return None if _size(made.shape) > LARGEST else made

    def binary_constant(self) -> Value | None:
        x = self.floats()
        if x is None:
            return None
        constant = self.b.constant(self.array(self.spread(x.shape)))
        return self.b.op(self.pick(*BINARY), *self.pick((x, constant), (constant, x)))

    def matmul(self) -> Value | None:
        x = self.floats(1)
        if x is None or isinstance(x.shape[-1], Dim):
            return None
        depth, columns = x.shape[-1], self.pick(*SIZES)
        weight = self.array((depth, columns), 1 / max(1, depth) ** 0.5)
        y = self.b.matmul(x, self.b.constant(weight))
        return self.b.add(y, self.b.constant(self.array((columns,)))) if self.chance(0.5) else y

    def product(self) -> Value | None:
        """Two computed values, one of them transposed if needed."""
        x, w = self.floats(2), self.floats(2)
        if x is None or w is None:
            return None
        if x.shape[-1] != w.shape[-2]:
            perm = [*range(w.rank - 2), w.rank - 1, w.rank - 2]
            w = self.b.transpose(w, perm=perm)
        depth = 4.0 if isinstance(x.shape[-1], Dim) else max(1.0, x.shape[-1])
        made = self.b.matmul(self.b.mul(x, 1 / depth), w)
        return None if _size(made.shape) > LARGEST else made

    def conv(self) -> Value | None:
        x = self.floats(3)
        if x is None or x.rank > 4 or isinstance(x.shape[1], Dim):
            return None
        spatial = x.rank - 2
        groups = self.pick(1, 1, x.shape[1]) or 1
        inner = x.shape[1] // groups
        filters = groups * self.pick(1, 2, 3, 8)
        kernel = tuple(self.pick(1, 2, 3) for _ in range(spatial))
        reach = max(1, inner * int(np.prod(kernel)))
        y = self.b.conv(
            x,
            self.b.constant(self.array((filters, inner, *kernel), 1 / reach**0.5)),
            strides=[self.pick(1, 1, 2) for _ in kernel],
            pads=[self.pick(0, 1) for _ in range(2 * spatial)],
            dilations=[self.pick(1, 1, 2) for _ in kernel],
            groups=groups,
        )
        return None if _is_empty(y) or _size(y.shape) > LARGEST else y

    def pool(self) -> Value | None:
        x = self.floats(3)
        if x is None or x.rank > 4:
            return None
        kernel = [self.pick(1, 2, 3) for _ in range(x.rank - 2)]
        pads = [self.pick(0, k // 2) for k in (*kernel, *kernel)]
        strides = [self.pick(1, 2) for _ in kernel]
        op = self.pick("max_pool", "avg_pool")
        y = self.b.op(op, x, kernel=kernel, pads=pads, strides=strides)
        return None if _is_empty(y) else y

    def reduce(self) -> Value | None:
        x = self.floats(1)
        if x is None:
            return None
        axes = [axis for axis in range(x.rank) if self.chance(0.5)] or [x.rank - 1]
        op = self.pick(*REDUCTIONS)
        if op != "reduce_sum" and any(_may_be_empty(x.shape[axis]) for axis in axes):
            op = "reduce_sum"
        y = self.b.op(op, x, axes=axes, keepdims=self.chance(0.5))
        return self.b.mul(y, 0.1) if op == "reduce_sum" else y

    def normalize(self) -> Value | None:
        x = self.floats(1)
        if x is None or _may_be_empty(x.shape[-1]):
            return None
        if self.chance(0.5):
            axis = self.random.integers(x.rank)
            return self.b.softmax(x, axis=int(axis))
        size = x.shape[-1]
        scale, bias = self.array((size,)), self.array((size,))
        # a large eps keeps rows of nearly equal numbers from being blown up
        return self.b.op(self.pick("layer_norm", "rms_norm"), x, scale, bias, axis=-1, eps=0.1)

    def move(self) -> Value | None:
        x = self.floats(1)
        if x is None:
            return None
        step = self.pick(
            self._transpose,
            self._slice,
            self._reshape,
            self._concat,
            self._split,
            self._expand,
            self._pad,
            self._gather,
        )
        made = step(x)
        return None if made is None or _size(made.shape) > LARGEST else self.kept(made, x)

    def _transpose(self, x: Value) -> Value:
        return self.b.transpose(x, perm=[int(axis) for axis in self.random.permutation(x.rank)])

    def _slice(self, x: Value) -> Value | None:
        axis = int(self.random.integers(x.rank))
        size = x.shape[axis]
        if isinstance(size, Dim) or size < 2:
            return None
        start, stop = sorted(int(i) for i in self.random.integers(0, size + 1, 2))
        step = self.pick(1, 1, 2, -1)
        if step < 0:
            start, stop = min(stop, size - 1), start - 1
        return self.b.slice(x, starts=[start], stops=[stop], steps=[step], axes=[axis])

    def _reshape(self, x: Value) -> Value:
        shape = list(x.shape)
        if len(shape) > 1 and self.chance(0.7):
            at = int(self.random.integers(len(shape) - 1))
            shape[at : at + 2] = [shape[at] * shape[at + 1]]
        elif not isinstance(shape[-1], Dim):
            part = next((p for p in (2, 3, 4) if shape[-1] % p == 0 and shape[-1]), 1)
            shape[-1:] = self.pick([shape[-1] // part, part], [part, shape[-1] // part])
        return self.b.reshape(x, shape=shape)

    def _concat(self, x: Value) -> Value:
        axis = int(self.random.integers(x.rank))
        around = (*x.shape[:axis], *x.shape[axis + 1 :])
        same = [
            v
            for v in self.values
            if v.dtype == x.dtype
            and v.rank == x.rank
            and (*v.shape[:axis], *v.shape[axis + 1 :]) == around
        ]
        other = same[self.random.integers(len(same))]
        return self.kept(self.b.concat(x, other, axis=axis), x, other)

    def _split(self, x: Value) -> Value | None:
        axis = int(self.random.integers(x.rank))
        size = x.shape[axis]
        if isinstance(size, Dim) or size < 2:
            return None
        first = int(self.random.integers(0, size + 1))
        parts = self.b.split(x, axis=axis, sizes=[first, size - first])
        self.values.append(self.kept(parts[1], x))
        return parts[0]

    def _expand(self, x: Value) -> Value:
        front = [self.pick(1, 2, 3)] if self.chance(0.5) and x.rank < 4 else []
        shape = [self.pick(1, 3, 5) if s == 1 else s for s in x.shape]
        return self.b.expand(x, shape=[*front, *shape])

    def _pad(self, x: Value) -> Value:
        pads = [self.pick(0, 0, 1, 2) for _ in range(2 * x.rank)]
        return self.b.pad(x, self.b.constant(np.float32(0.5)), pads=pads)

    def _gather(self, x: Value) -> Value | None:
        axis = int(self.random.integers(x.rank))
        size = x.shape[axis]
        if isinstance(size, Dim) or size == 0:
            return None
        indices = self.random.integers(-size, size, self.pick((), (3,), (2, 2)))
        return self.b.gather(x, self.b.constant(indices.astype(np.int64)), axis=axis)

    def where(self) -> Value | None:
        x, y = self.floats(exact=True), self.floats()
        if x is None or y is None:
            return None
        condition = self.b.op(self.pick(*COMPARISONS), x, self.pick(0.0, 0.25))
        made = self.b.where(condition, y, self.pick(0.0, -0.5))
        return None if _size(made.shape) > LARGEST else made

    def convert(self) -> Value | None:
        """Whole numbers, booleans and half floats, and back to f32."""
        x = self.floats(exact=True)
        if x is None:
            return None
        to = self.pick("i32", "i64", "i8", "f16", "f64", "bool")
        narrow = self.b.cast(self.b.mul(x, 8.0), to=to)
        if narrow.dtype.is_integer and self.chance(0.5):
            narrow = self.b.op(self.pick("add", "mul", "sub"), narrow, narrow)
        return self.b.mul(self.b.cast(narrow, to="f32"), 0.125)

    def rank(self) -> Value | None:
        x = self.floats(1, exact=True)
        if x is None:
            return None
        axis = int(self.random.integers(x.rank))
        if _may_be_empty(x.shape[axis]):
            return None
        if self.chance(0.5):
            found = self.b.op(self.pick("argmax", "argmin"), x, axis=axis)
            return self.b.mul(self.b.cast(found, to="f32"), 0.1)
        k = int(self.random.integers(1, x.shape[axis] + 1))
        values, _ = self.b.top_k(x, k=k, axis=axis)
        return self.kept(values, x)

    def running(self) -> Value | None:
        x = self.floats(1)
        if x is None:
            return None
        axis = int(self.random.integers(x.rank))
        return self.b.mul(self.b.cumsum(x, axis=axis, reverse=self.chance(0.5)), 0.1)

    # results

    def graph(self) -> Graph:
        """A graph whose results are all unread values and one from the middle."""
        read = {v for node in self.b.nodes for v in node.operands}
        wanted = [v for v in self.values if v not in read]
        wanted.append(self.values[self.random.integers(len(self.values))])
        return self.b.build(**{f"y{number}": v for number, v in enumerate(dict.fromkeys(wanted))})

    def feeds(self, graph: Graph) -> list[dict[str, Array]]:
        found = []
        for batch in BATCHES[: 3 if self.chance(0.8) else 5]:
            shapes = [v.tensor.concrete({"n": batch}) for v in graph.inputs]
            arrays = zip(graph.inputs, shapes, strict=True)
            found.append({v.name: self.array(shape) for v, shape in arrays})
        return found if graph.input_symbols else found[:1]


def random_graph(seed: int) -> tuple[Graph, list[dict[str, Array]]]:
    generator = Generator(seed)
    graph = generator.graph()
    return graph, generator.feeds(graph)


def _may_be_empty(size: Any) -> bool:
    return isinstance(size, Dim) or size == 0


def _is_empty(value: Value) -> bool:
    return any(size == 0 for size in value.shape)


def _size(shape: Any) -> int:
    """Elements at a batch of 5."""
    try:
        return int(np.prod([evaluate(size, {"n": 5}) for size in shape]))
    except RunError:  # sizes that do not broadcast
        return LARGEST + 1
