"""Precisions for a described workload, measured on this machine: `QuantizationSystem.recommend`.

    work = bw.Workload("matmul", ((64, 768), (768, 3072)), min_sqnr_db=30)
    print(system.recommend(work))

The product is compiled at every precision, timed with all sides interleaved, and compared with
f32. The fastest one that meets the requirements is recommended; without data, values are random
and the result says so.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from bitwright.errors import QuantizationError
from bitwright.executable import Executable
from bitwright.ir.graph import Graph
from bitwright.machine.memory import arena_bytes, constant_bytes
from bitwright.machine.timing import Timing, time_sides
from bitwright.ops.core.builder import Builder
from bitwright.pipeline import compile_graph
from bitwright.quant.core.measure import quality
from bitwright.quant.model.quantize import quantize
from bitwright.warn import DataWarning

Array = np.ndarray[Any, Any]
OPERATIONS = ("matmul", "conv2d")
_POLICIES = {"bf16": "mixed_bf16", "f16": "mixed"}
_RECIPES = {"int8": "int8-static", "int8_dynamic": "int8-dynamic", "w8": "w8", "w4": "w4"}
PRECISIONS = ("f32", *_POLICIES, *_RECIPES)
_PARTS = {
    "f32": ("f32", "f32", "f32"),
    "bf16": ("bf16", "bf16", "f32"),
    "f16": ("f16", "f16", "f32"),
    "int8": ("int8 per channel", "8 bits, static range", "int32"),
    "int8_dynamic": ("int8 per channel", "8 bits, range per row", "int32"),
    "w8": ("int8 per channel", "f32", "f32"),
    "w4": ("int4 in blocks", "f32", "f32"),
}
"""The precision of weights, activations and sums."""
_SAMPLES = 4
_SECONDS = 0.4


@dataclass(frozen=True)
class Workload:
    """A product and what is required of it."""

    operation: str
    """matmul or conv2d."""
    shapes: tuple[Sequence[int], Sequence[int]]
    """Of the activations and of the weights: [m, k] and [k, n], or [n, c, h, w] and
    [m, c, kh, kw]."""
    dtypes: Sequence[str] = PRECISIONS
    """The precisions to consider."""
    max_seconds: float | None = None
    max_bytes: int | None = None
    """Of weights and intermediate values."""
    min_sqnr_db: float | None = None
    data: Sequence[Any] = ()
    """Samples of the activations; random if there are none."""
    weights: Any = None
    """The weights; random if None."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """Those of the convolution, such as strides and pads."""
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.operation not in OPERATIONS:
            raise QuantizationError(
                "unknown operation", expected=" or ".join(OPERATIONS), found=self.operation
            )
        rank = 2 if self.operation == "matmul" else 4
        if len(self.shapes) != 2 or any(len(shape) != rank for shape in self.shapes):
            raise QuantizationError(
                f"{self.operation} needs two shapes of rank {rank}", found=self.shapes
            )
        x, w = self.shapes
        if any(size < 1 for shape in self.shapes for size in shape):
            raise QuantizationError("a size is less than 1", found=self.shapes)
        if self.operation == "matmul" and x[1] != w[0]:
            raise QuantizationError("the shapes do not fit", expected=f"[{x[1]}, n]", found=list(w))
        unknown = [name for name in self.dtypes if name not in PRECISIONS]
        if unknown or not self.dtypes:
            raise QuantizationError(
                "unknown precision", expected=", ".join(PRECISIONS), found=unknown or "none"
            )


@dataclass(frozen=True)
class Candidate:
    """A precision as measured."""

    precision: str
    timing: Timing
    nbytes: int
    sqnr_db: float
    times_f32: float
    unmet: tuple[str, ...]
    """The requirements that it does not meet."""

    def __str__(self) -> str:
        text = (
            f"{self.precision}: {self.timing.median * 1e6:.1f} us, {self.times_f32:.2f} times f32, "
            f"{self.nbytes / 1e6:.3f} MB, SQNR {self.sqnr_db:.1f} dB"
        )
        return text + (f"; fails: {', '.join(self.unmet)}" if self.unmet else "")


@dataclass(frozen=True)
class Part:
    """The precision of one part of the product, and the measured reason."""

    name: str
    precision: str
    reason: str


@dataclass(frozen=True)
class Recommendation:
    """The recommended precision of each part, and all that was measured."""

    precision: str
    parts: tuple[Part, ...]
    candidates: tuple[Candidate, ...]
    is_met: bool
    """Whether the requirements are met."""
    measured_on: str

    def __str__(self) -> str:
        lines = [f"{self.precision}" + ("" if self.is_met else " (no precision meets all)")]
        lines += [f"  {part.name}: {part.precision} ({part.reason})" for part in self.parts]
        lines += [f"measured on {self.measured_on}:"]
        return "\n".join([*lines, *(f"  {one}" for one in self.candidates)])


def recommend(work: Workload) -> Recommendation:
    """Measure a workload at each precision and recommend one."""
    rng = np.random.default_rng(0)
    w = work.weights
    if w is None:
        w = rng.normal(size=tuple(work.shapes[1]))
    w = np.asarray(w, np.float32)
    samples = [np.asarray(sample, np.float32) for sample in work.data]
    measured_on = f"{len(samples)} given samples" if samples else "random values"
    if not samples:
        samples = [
            rng.normal(size=tuple(work.shapes[0])).astype(np.float32) for _ in range(_SAMPLES)
        ]
    _require(w, work.shapes[1], "weights")
    for sample in samples:
        _require(sample, work.shapes[0], "data")
    graph = _graph(work, w)
    names = list(dict.fromkeys(("f32", *work.dtypes)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DataWarning)  # few samples are enough for one product
        built = {name: _compiled(graph, name, samples, work.threads) for name in names}
    feeds = {"x": samples[-1]}
    runs = {name: partial(exe.run, feeds) for name, exe in built.items()}
    timings = time_sides(runs, _SECONDS)
    exact = built["f32"].run(feeds)["y"]
    found = []
    for name in names:
        exe, timing = built[name], timings[name]
        nbytes = constant_bytes(exe) + (arena_bytes(exe, {}) or 0)
        sqnr = quality(exact, exe.run(feeds)["y"]).sqnr
        ratio = timing.times_faster_than(timings["f32"])
        unmet = _unmet(work, timing, nbytes, sqnr)
        found.append(Candidate(name, timing, nbytes, sqnr, ratio, unmet))
    allowed = [one for one in found if one.precision in work.dtypes]
    good = [one for one in allowed if not one.unmet]
    least = min(len(one.unmet) for one in allowed)
    choice = min(
        good or [one for one in allowed if len(one.unmet) == least],
        key=lambda one: one.timing.median,
    )
    return Recommendation(
        choice.precision, _parts(choice, found[0]), tuple(found), bool(good), measured_on
    )


def _require(array: Array, shape: Sequence[int], what: str) -> None:
    if array.shape != tuple(shape):
        raise QuantizationError(
            f"{what} and shape differ", expected=list(shape), found=list(array.shape)
        )


def _graph(work: Workload, w: Array) -> Graph:
    b = Builder(work.operation)
    x = b.input("x", f"f32[{', '.join(map(str, work.shapes[0]))}]")
    if work.operation == "matmul":
        return b.build(y=b.matmul(x, b.constant(w)))
    return b.build(y=b.conv(x, b.constant(w), **dict(work.attributes)))


def _compiled(
    graph: Graph, precision: str, samples: Sequence[Array], threads: int | None
) -> Executable:
    if precision in _RECIPES:
        data = [{"x": sample} for sample in samples]
        graph = quantize(graph, data, _RECIPES[precision], threads=threads, progress=False).graph
    return compile_graph(graph, threads=threads, precision=_POLICIES.get(precision))


def _unmet(work: Workload, timing: Timing, nbytes: int, sqnr: float) -> tuple[str, ...]:
    found = []
    if work.max_seconds is not None and timing.median > work.max_seconds:
        found.append(f"{timing.median * 1e6:.1f} us is over {work.max_seconds * 1e6:.1f} us")
    if work.max_bytes is not None and nbytes > work.max_bytes:
        found.append(f"{nbytes} bytes are over {work.max_bytes}")
    if work.min_sqnr_db is not None and sqnr < work.min_sqnr_db:
        found.append(f"{sqnr:.1f} dB is under {work.min_sqnr_db:.1f} dB")
    return tuple(found)


def _parts(choice: Candidate, plain: Candidate) -> tuple[Part, ...]:
    weights, activations, sums = _PARTS[choice.precision]
    saving = plain.nbytes / max(choice.nbytes, 1)
    speed = f"{choice.times_f32:.2f} times the speed of f32"
    return (
        Part("weights", weights, f"{choice.nbytes} bytes in all, {saving:.2f} times fewer"),
        Part("activations", activations, f"SQNR {choice.sqnr_db:.1f} dB, {speed}"),
        Part("sums", sums, "exact" if sums == "int32" else "as the kernel computes them"),
        Part("output", "f32", "as the model declares it"),
    )
