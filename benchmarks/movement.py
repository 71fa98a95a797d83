"""Microseconds of the movement and window kernels on one thread, vs. numpy or ONNX Runtime.

    python benchmarks/movement.py [--target avx2] [--seconds 0.5] [WORD ...]

Runs the cases whose name contains one of the words. Prints the best of many interleaved calls; a
median would depend on other load.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

import bitwright.backends.cpu.lowering.registered as _lower
from bitwright.backends.cpu.codegen.jit import load_all
from bitwright.backends.cpu.lowering.context import Lowering
from bitwright.backends.cpu.runtime.memory import DynamicMemory
from bitwright.backends.cpu.runtime.native import runtime
from bitwright.backends.cpu.runtime.steps import KernelSegment, StepTable
from bitwright.ir.dtype import dtype
from bitwright.ir.graph import Graph
from bitwright.ir.types import TensorType
from bitwright.lir.buffer import Storage
from bitwright.lir.schedule import KernelStep
from bitwright.ops.core.builder import Builder
from bitwright.target import Target, named

assert _lower.__name__  # importing it registers the lowerings
Array = np.ndarray[Any, Any]
Call = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    name: str
    graph: Graph
    feeds: dict[str, Array]
    other: Call
    """The same work by numpy or ONNX Runtime."""
    nbytes: int = 0
    """Bytes read and written, if a rate is meaningful."""


def native(graph: Graph, feeds: dict[str, Array], target: Target) -> Call:
    """The graph's kernels as one call on one thread.

    For an NHWC result, the copy into the row-major output is left out.
    """
    lowering = Lowering(graph, target)
    schedule = lowering.run()
    steps = [step for step in schedule.steps if isinstance(step, KernelStep)]
    assert len(steps) == len(schedule.steps), schedule
    if len(steps) > 1 and steps[-1].node == "y":
        steps.pop()
    kernels = {step.kernel: lowering.kernels[step.kernel] for step in steps}
    library = load_all([lowering.text(kernel) for kernel in kernels.values()], target)
    memory = DynamicMemory({})
    memory.give(lowering.fault_buffer, np.zeros(2, np.int64))
    for buffer in schedule.buffers:
        if buffer.storage is Storage.INPUT:
            memory.give(buffer, feeds[buffer.name])
        elif buffer.storage is Storage.OUTPUT:
            memory.give(buffer, np.zeros(int(buffer.count), buffer.dtype.numpy))
    addresses = {name: library.address(name) for name in kernels}
    signatures = {name: kernel.signature for name, kernel in kernels.items()}
    table = StepTable(KernelSegment(steps, addresses, signatures), memory)
    table.set_addresses()
    run, keeps = runtime().run, (library, memory, feeds)

    def call(_: Any = keeps) -> None:
        run(table.address, table.count, 0, 1, 0)

    return call


def graph_of(op: str, x: Array, last: bool = False, *others: Array, **attrs: Any) -> Graph:
    """One op on x, which is NHWC if `last`."""
    b = Builder(op)
    value = b.input("x", TensorType(dtype(x.dtype), x.shape))
    if last:
        value = b.transpose(value, perm=(0, 3, 1, 2))
    more = [
        b.input(f"x{i}", TensorType(dtype(other.dtype), other.shape))
        for i, other in enumerate(others)
    ]
    return b.build(y=b.op(op, value, *more, **attrs))


def onnx_call(op_type: str, x: Array, constants: dict[str, Array], **attrs: Any) -> Call:
    """One ONNX op in ONNX Runtime, on one thread, without copies of inputs."""
    node = helper.make_node(op_type, ["x", *constants], ["y"], **attrs)
    given = [
        helper.make_tensor(
            name, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape, a.tobytes(), raw=True
        )
        for name, a in constants.items()
        if name
    ]
    graph = helper.make_graph(
        [node],
        op_type,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        given,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    binding = session.io_binding()
    binding.bind_ortvalue_input("x", onnxruntime.OrtValue.ortvalue_from_numpy(x))
    binding.bind_output("y")
    return lambda: session.run_with_iobinding(binding)


def transposes() -> Iterator[Case]:
    shapes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
        ((1024, 1024), (0, 1)),
        ((1024, 1024), (1, 0)),
        ((1000, 1000), (1, 0)),
        ((64, 64), (1, 0)),
        ((8, 128, 12, 64), (0, 2, 1, 3)),
        ((8, 128, 12, 64), (0, 2, 3, 1)),
        ((1, 64, 112, 112), (0, 2, 3, 1)),
        ((1, 112, 112, 64), (0, 3, 1, 2)),
        ((1, 3, 224, 224), (0, 2, 3, 1)),
        ((1, 224, 224, 3), (0, 3, 1, 2)),
    ]
    for element in ("f32", "f16", "i8"):
        for shape, perm in shapes:
            x = np.ones(shape, dtype(element).numpy)
            y = np.empty_like(x.transpose(perm), order="C")
            graph = graph_of("transpose", x, perm=perm)
            name = f"{element} transpose {shape} {perm}"
            copy = lambda y=y, x=x, perm=perm: np.copyto(y, x.transpose(perm))
            yield Case(name, graph, {"x": x}, copy, 2 * x.nbytes)


def others() -> Iterator[Case]:
    table, at = np.ones((30522, 768), np.float32), np.arange(0, 30000, 230)
    found = np.empty((at.size, 768), np.float32)
    yield Case(
        "gather of 131 rows of 768",
        graph_of("gather", table, False, at),
        {"x": table, "x0": at},
        lambda: np.take(table, at, 0, found, "clip"),
        2 * found.nbytes,
    )
    parts = [np.ones((1, c, 56, 56), np.float32) for c in (64, 128)]
    joined = np.empty((1, 192, 56, 56), np.float32)
    yield Case(
        "concat of channels",
        graph_of("concat", parts[0], False, parts[1], axis=1),
        {"x": parts[0], "x0": parts[1]},
        lambda: np.concatenate(parts, 1, joined),
        2 * joined.nbytes,
    )
    image = np.ones((1, 64, 56, 56), np.float32)
    yield Case(
        "pad by 1",
        graph_of("pad", image, pads=(0, 0, 1, 1, 0, 0, 1, 1)),
        {"x": image},
        onnx_call("Pad", image, {"pads": np.array([0, 0, 1, 1, 0, 0, 1, 1])}),
        2 * image.nbytes,
    )


def windows() -> Iterator[Case]:
    for channels, size, kernel, stride, pad in [
        (64, 112, 3, 2, 1),
        (64, 56, 2, 2, 0),
        (192, 28, 3, 1, 1),
    ]:
        x = np.random.default_rng(0).random((1, channels, size, size), np.float32)
        transposed = np.ascontiguousarray(x.transpose(0, 2, 3, 1))
        attrs = {"kernel": (kernel,) * 2, "strides": (stride,) * 2, "pads": (pad,) * 4}
        for op, op_type in (("max_pool", "MaxPool"), ("avg_pool", "AveragePool")):
            onnx = onnx_call(
                op_type, x, {}, kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=[pad] * 4
            )
            name = f"{op} {channels} x {size} x {size}, {kernel} by {stride}"
            yield Case(name, graph_of(op, x, **attrs), {"x": x}, onnx)
            yield Case(
                f"{name}, last", graph_of(op, transposed, True, **attrs), {"x": transposed}, onnx
            )
    x = np.random.default_rng(0).random((1, 64, 40, 40), np.float32)
    transposed = np.ascontiguousarray(x.transpose(0, 2, 3, 1))
    for mode in ("nearest", "linear", "cubic"):
        scales = np.array([1, 1, 2, 2], np.float32)
        onnx = onnx_call("Resize", x, {"": np.zeros(0, np.float32), "s": scales}, mode=mode)
        attrs = {"sizes": (1, 64, 80, 80), "mode": mode}
        yield Case(f"resize {mode} by 2", graph_of("resize", x, **attrs), {"x": x}, onnx)
        graph = graph_of("resize", transposed, True, **attrs)
        yield Case(f"resize {mode} by 2, last", graph, {"x": transposed}, onnx)


def measure(calls: list[Call], seconds: float) -> list[float]:
    """The best time of each call; calls are interleaved."""
    best = [float("inf")] * len(calls)
    for call in calls:
        call()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for number, call in enumerate(calls):
            begin = time.perf_counter()
            call()
            best[number] = min(best[number], time.perf_counter() - begin)
    return best


def report(cases: Iterable[Case], description: str, width: int) -> None:
    """Parses the options, then measures and prints the cases they select."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("words", nargs="*")
    parser.add_argument("--target", default="host")
    parser.add_argument("--seconds", type=float, default=0.5)
    options = parser.parse_args()
    print(f"{'case':{width}} {'bitwright':>10} {'other':>10}")
    for case in cases:
        if options.words and not any(word in case.name for word in options.words):
            continue
        call = native(case.graph, case.feeds, named(options.target))
        ours, theirs = measure([call, case.other], options.seconds)
        rate = f"{case.nbytes / ours / 1e9:6.1f} GB/s" if case.nbytes else ""
        times = f"{ours * 1e6:10.1f} {theirs * 1e6:10.1f} {theirs / ours:6.1f}x"
        print(f"{case.name:{width}} {times} {rate}")


if __name__ == "__main__":
    report(chain(transposes(), others(), windows()), __doc__, 55)
