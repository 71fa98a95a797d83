"""Grows a random ONNX model, node by node, and knows the shape of every value.

    growing = Growing(seed)
    x = growing.image(2)                          # a value [batch, channels, height, width]
    y = growing.make("Relu", [x], x.shape)

A size is a number or a name: `n` and `h` are given at run time, others follow from them. A value is
`exact` if every runtime must give the same bits: inputs, constants, and movements or comparisons of
exact values. Discontinuous ops (rounding, ranking, comparing) read exact values only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Array = np.ndarray[Any, Any]
Size = int | str
Shape = tuple[Size, ...]
SIZES = (1, 1, 1, 2, 2, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33)
CHANNELS = (1, 1, 2, 2, 3, 4, 5, 8, 8, 16, 17, 32, 33)
PIXELS = (1, 1, 1, 2, 2, 3, 4, 5, 7, 8, 9, 16)
LARGEST = 1 << 14
USUAL = {"n": 3, "h": 9}
"""What the named sizes are taken for where a limit on elements is asked about."""
OPSET, IR_VERSION = 23, 11
F32, F64, F16 = np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.float16)
I64, I32 = np.dtype(np.int64), np.dtype(np.int32)
U8, I8, BOOL = np.dtype(np.uint8), np.dtype(np.int8), np.dtype(np.bool_)


@dataclass(frozen=True)
class Value:
    name: str
    dtype: np.dtype[Any]
    shape: Shape
    exact: bool = False

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def count(self) -> int:
        return count(self.shape)

    @property
    def fixed(self) -> bool:
        """Whether every size is a number."""
        return all(isinstance(size, int) for size in self.shape)


@dataclass
class Growing:
    seed: int
    values: list[Value] = field(default_factory=list)
    inputs: list[Value] = field(default_factory=list)
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: dict[str, Array] = field(default_factory=dict)
    structural: set[str] = field(default_factory=set)
    """Constants whose numbers decide shapes, types or places: noise on them is another model."""
    wobbles: dict[str, Array] = field(default_factory=dict)
    """How far constants may move that a compiler rounds: float biases of quantized layers."""
    read: set[str] = field(default_factory=set)
    casts_to_real: list[int] = field(default_factory=list)
    """Numbers of the nodes that cast to the model's type of floats."""

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.is_symbolic = self.chance(0.5)
        self.real = F32
        """What the model has in place of every f32."""
        self.fixed_feeds: dict[str, Array] = {}
        """Inputs that decide sizes or places, and what they are fed."""
        self.singles: set[str] = set()
        """What is f32 in every model."""
        self._number = 0

    # choices

    def pick(self, *options: Any) -> Any:
        return options[self.random.integers(len(options))]

    def chance(self, share: float) -> bool:
        return bool(self.random.random() < share)

    def integer(self, low: int, high: int) -> int:
        """From low to high, both included."""
        return int(self.random.integers(low, high + 1))

    def array(self, shape: Sequence[int], scale: float = 1.0, dtype: Any = F32) -> Array:
        dtype = np.dtype(dtype)
        if dtype == BOOL:
            return self.random.random(tuple(shape)) < 0.5
        if dtype.kind == "f":
            return (self.random.uniform(-1, 1, tuple(shape)) * scale).astype(dtype)
        low, high = (0, 255) if dtype == U8 else (-128, 127) if dtype == I8 else (-9, 9)
        return self.random.integers(low, high, tuple(shape), endpoint=True).astype(dtype)

    # values

    def name(self, prefix: str = "v") -> str:
        self._number += 1
        return f"{prefix}{self._number}"

    def size(self, sizes: Sequence[int] = SIZES) -> int:
        return 0 if self.chance(0.02) else self.pick(*sizes)

    def enter(self, shape: Sequence[Size], dtype: Any = F32) -> Value:
        """A new input of the model; too large shapes are halved."""
        sizes = list(shape)
        while count(sizes) > LARGEST:
            largest = max((s for s in sizes if isinstance(s, int)), default=1)
            sizes[sizes.index(largest)] = largest // 2
        value = Value(self.name("x"), np.dtype(dtype), tuple(sizes), True)
        self.inputs.append(value)
        self.values.append(value)
        return value

    def constant(self, array: Any, structural: bool = False, wobble: Any = None) -> Value:
        array = np.asarray(array)
        value = Value(self.name("c"), array.dtype, array.shape, True)
        self.constants[value.name] = array
        if structural:
            self.structural.add(value.name)
        if wobble is not None:
            self.wobbles[value.name] = np.asarray(wobble)
        return value

    def numbers(self, values: Sequence[int]) -> Value:
        """A vector of i64 that decides sizes or places; sometimes only the run knows it."""
        return self.decisive(np.array(values, np.int64))

    def decisive(self, array: Array, is_real: bool = True) -> Value:
        """An array that decides sizes or places; floats of it are f32 in any model, or not."""
        if not self.chance(0.1):
            value = self.constant(array, structural=True)
        else:
            value = Value(self.name("x"), array.dtype, array.shape, True)
            self.inputs.append(value)
            self.fixed_feeds[value.name] = array
        if not is_real:
            self.singles.add(value.name)
        return value

    def find(
        self, dtype: Any = F32, ranks: Sequence[int] = range(1, 6), exact: bool = False
    ) -> Value | None:
        found = [
            v
            for v in self.values
            if v.dtype == dtype and v.rank in ranks and (v.exact or not exact)
        ]
        return found[self.random.integers(len(found))] if found else None

    def operand(
        self, dtype: Any = F32, ranks: Sequence[int] = range(1, 5), exact: bool = False
    ) -> Value:
        """A value that there is, or a new input."""
        found = self.find(dtype, ranks, exact)
        if found is not None and self.chance(0.75):
            return found
        rank = self.pick(*ranks)
        shape: list[Size] = [self.size() for _ in range(rank)]
        if rank and self.is_symbolic and self.chance(0.6):
            shape[0] = "n"
        return self.enter(shape, dtype)

    def image(self, spatial: int, dtype: Any = F32, exact: bool = False) -> Value:
        """[batch, channels, *spatial], with a number of channels that is known."""
        found = self.find(dtype, (spatial + 2,), exact)
        if found is not None and isinstance(found.shape[1], int) and self.chance(0.6):
            return found
        shape: list[Size] = [self.pick(1, 1, 2, 3), self.size(CHANNELS)]
        shape += [self.size(PIXELS) for _ in range(spatial)]
        if self.is_symbolic:
            shape[0] = "n" if self.chance(0.7) else shape[0]
            for axis in range(2, spatial + 2):
                shape[axis] = "h" if self.chance(0.15) else shape[axis]
        return self.enter(shape, dtype)

    def other(self, shape: Sequence[Size], dtype: Any = F32, scale: float = 1.0) -> Value:
        """An operand that broadcasts to a shape: a constant, or an input."""
        kept = [1 if self.chance(0.25) else s for s in shape]
        kept = kept[self.integer(0, len(kept)) :] if self.chance(0.4) else kept
        if self.chance(0.5):
            sizes = [1 if isinstance(s, str) else s for s in kept]
            return self.constant(self.array(sizes, scale, dtype))
        if any(isinstance(s, str) and s not in USUAL for s in kept):
            kept = [1 if isinstance(s, str) else s for s in kept]
        return self.enter(kept, dtype)

    def weight(self, shape: Sequence[int], fan: int, dtype: Any = F32) -> Value:
        """Mostly a constant; sometimes an input, for kernels that pack nothing."""
        scale = 1 / max(1, fan) ** 0.5
        if self.chance(0.85):
            return self.constant(self.array(shape, scale, dtype))
        return self.enter(shape, dtype)

    def unknown(self) -> str:
        """A size of the run that follows from others in a way that is not tracked."""
        return self.name("s")

    # nodes

    def nodes_of(
        self,
        op: str,
        inputs: Sequence[Value | None],
        results: Sequence[tuple[Any, Sequence[Size], bool]],
        domain: str = "",
        **attrs: Any,
    ) -> list[Value]:
        """A node with results of given types, shapes and exactness."""
        if attrs.get("to") == TensorProto.FLOAT:
            self.casts_to_real.append(len(self.nodes))
        made = [Value(self.name(), np.dtype(d), tuple(s), e) for d, s, e in results]
        names = ["" if v is None else v.name for v in inputs]
        while names and not names[-1]:
            names.pop()
        given = {key: value for key, value in attrs.items() if value is not None}
        outputs = [v.name for v in made]
        self.nodes.append(helper.make_node(op, names, outputs, domain=domain, **given))
        self.read.update(names)
        self.values += made
        return made

    def make(
        self,
        op: str,
        inputs: Sequence[Value | None],
        shape: Sequence[Size],
        dtype: Any = F32,
        exact: bool = False,
        **attrs: Any,
    ) -> Value:
        return self.nodes_of(op, inputs, [(dtype, shape, exact)], **attrs)[0]

    def move(
        self, op: str, inputs: Sequence[Value | None], shape: Sequence[Size], **attrs: Any
    ) -> Value:
        """A node that only moves the elements of its first operand."""
        x = inputs[0]
        assert x is not None
        exact = all(v is None or v.exact for v in inputs)
        return self.make(op, inputs, shape, x.dtype, exact, **attrs)

    # the model

    def model(self) -> onnx.ModelProto:
        """Everything that nothing reads is a result, and one value from the middle."""
        made = [v for v in self.values if v not in self.inputs]
        wanted = [v for v in made if v.name not in self.read]
        if made:
            wanted.append(made[self.random.integers(len(made))])
        wanted = list({v.name: v for v in wanted}.values())
        used = [v for v in self.inputs if v.name in self.read]
        return self._proto(used, wanted, self.constants)

    def noisy(self, model: onnx.ModelProto, seed: int) -> onnx.ModelProto:
        """The same model with noise of a few roundings on the constants that may have it."""
        made = onnx.ModelProto()
        made.CopyFrom(model)
        for tensor in made.graph.initializer:
            if tensor.name not in self.structural:
                array = noise(numpy_helper.to_array(tensor), seed)
                if tensor.name in self.wobbles:
                    away = np.random.default_rng(seed).uniform(-1, 1, array.shape)
                    away = np.full(array.shape, (1, -1)[seed]) if seed < 2 else away
                    array = (array + away * self.wobbles[tensor.name]).astype(array.dtype)
                tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
        return made

    def _proto(
        self, inputs: Sequence[Value], outputs: Sequence[Value], constants: dict[str, Array]
    ) -> onnx.ModelProto:
        for number in self.casts_to_real:
            (to,) = (a for a in self.nodes[number].attribute if a.name == "to")
            to.i = helper.np_dtype_to_tensor_dtype(self.real)
        constants = {name: self._real(array, name) for name, array in constants.items()}
        graph = helper.make_graph(
            self.nodes,
            f"random{self.seed}",
            [helper.make_tensor_value_info(v.name, self._element(v), v.shape) for v in inputs],
            [helper.make_tensor_value_info(v.name, self._element(v), None) for v in outputs],
            [
                numpy_helper.from_array(a, name)
                for name, a in constants.items()
                if name in self.read
            ],
        )
        opset = helper.make_opsetid("", OPSET)
        return helper.make_model(graph, opset_imports=[opset], ir_version=IR_VERSION)

    def _real(self, array: Array, name: str) -> Array:
        """The array in the type that it has in this model."""
        return array.astype(self.real) if self._is_real(array, name) else array

    def _is_real(self, held: Array | Value, name: str) -> bool:
        return held.dtype == F32 and name not in self.singles

    def _element(self, value: Value) -> int:
        is_real = self._is_real(value, value.name)
        return helper.np_dtype_to_tensor_dtype(self.real if is_real else value.dtype)

    def feeds(self, bindings: dict[str, int]) -> dict[str, Array]:
        """Random inputs of these sizes; not all of them row by row in memory."""
        found = {}
        for v in self.inputs:
            if v.name in self.read:
                shape = [bindings[s] if isinstance(s, str) else s for s in v.shape]
                array = self.fixed_feeds.get(v.name)
                array = self.array(shape, 1.0, v.dtype) if array is None else array
                array = self._real(array, v.name)
                transposed = array.ndim > 1 and self.chance(0.2)
                found[v.name] = np.asfortranarray(array) if transposed else array
        return found


def noise(array: Array, seed: int) -> Array:
    """The array with noise of about a rounding of f32; whole numbers stay as they are."""
    if array.dtype.kind != "f":
        return array
    size = 1e-6 if array.itemsize > 2 else 2e-3
    factor = np.random.default_rng(seed).uniform(-size, size, array.shape)
    return (array * (1 + factor)).astype(array.dtype)


def count(shape: Sequence[Size]) -> int:
    """Elements at the usual sizes."""
    total = 1
    for size in shape:
        total *= USUAL.get(size, 8) if isinstance(size, str) else size
    return total


def broadcast(x: Sequence[Size], y: Sequence[Size]) -> Shape | None:
    """The shape of two operands together; None if they do not fit for certain."""
    rank = max(len(x), len(y))
    found: list[Size] = []
    for a, b in zip([1] * (rank - len(x)) + list(x), [1] * (rank - len(y)) + list(y), strict=True):
        if a != b and a != 1 and b != 1:
            return None
        found.append(b if a == 1 else a)
    return tuple(found)
