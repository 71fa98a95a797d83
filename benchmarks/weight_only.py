"""GB/s of weight-only matmuls with few rows, vs. memory bandwidth and ONNX Runtime.

    python benchmarks/weight_only.py [--size 4096] [--threads 2] [--block 32] [--rows 1] [kind ...]

A chain of square products whose weights are four times the last-level cache, so that every matrix
is read from memory. Bytes are quantized weights and scales as stored. Prints the best of many
interleaved runs; a median would depend on other load. The benchmark measures the bandwidth itself,
with a sum over as much memory.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import bitwright as bw
from bitwright.backends.cpu.profile.peaks import memory_reader
from bitwright.ir.dtype import dtype
from bitwright.ir.graph import Graph
from bitwright.lir.buffer import Storage
from bitwright.ops.core.builder import Builder
from bitwright.target import host

KINDS = ("f32", "i8", "i4")
Array = np.ndarray[Any, Any]


def random_weight(rng: np.random.Generator, kind: str, size: int) -> Array:
    element = dtype(kind)
    if element.is_integer:
        low, high = int(element.min), int(element.max)
        return rng.integers(low, high, (size, size), np.int8, True).astype(element.numpy)
    return rng.standard_normal((size, size), np.float32).astype(element.numpy)


def chain(kind: str, size: int, block: int, rows: int, count: int) -> Graph:
    rng, b = np.random.default_rng(0), Builder("chain")
    y = b.input("x", f"f32[{rows}, {size}]")
    for _ in range(count):
        w = random_weight(rng, kind, size)
        scale = np.full((size, -(-size // block)), 0.013, np.float32) + rng.random(
            (size, -(-size // block)), np.float32
        ) * np.float32(1e-3)
        if kind == "f32":
            y = b.matmul(y, b.constant(w * np.float32(size**-0.5)))
        else:
            y = b.dequant_matmul(y, b.constant(w), b.constant(scale), block=block)
    return b.build(y=y)


def held_bytes(exe: Any) -> int:
    buffers = exe.engine.schedule.buffers
    return sum(buffer.array.nbytes for buffer in buffers if buffer.storage is Storage.CONSTANT)


def onnxruntime_chain(
    size: int, block: int, rows: int, count: int, threads: int
) -> Callable[[], object] | None:
    try:
        import onnxruntime as ort
        from onnx import TensorProto, helper
    except ImportError:
        return None
    rng = np.random.default_rng(0)
    nodes, tensors = [], []
    for i in range(count):
        packed = rng.integers(0, 256, (size, size // block, block // 2), np.uint8)
        scale = np.full(size * size // block, 0.013, np.float32)
        for name, array in ((f"w{i}", packed), (f"s{i}", scale)):
            kind = helper.np_dtype_to_tensor_dtype(array.dtype)
            tensors.append(helper.make_tensor(name, kind, array.shape, array.tobytes(), raw=True))
        nodes.append(
            helper.make_node(
                "MatMulNBits",
                [f"x{i}", f"w{i}", f"s{i}"],
                [f"x{i + 1}"],
                domain="com.microsoft",
                K=size,
                N=size,
                bits=4,
                block_size=block,
            )
        )
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [rows, size])
        for name in ("x0", f"x{count}")
    ]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:], tensors)
    sets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=sets, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    feeds = {"x0": rng.standard_normal((rows, size), np.float32)}
    return lambda: session.run(None, feeds)


def best_times(sides: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    best = dict.fromkeys(sides, float("inf"))
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, run in sides.items():
            begin = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - begin)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", default=KINDS)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--threads", type=int, default=host().cores)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument(
        "--matrices", type=int, default=0, help="0: four times the last-level cache"
    )
    options = parser.parse_args()
    sides: dict[str, Callable[[], object]] = {}
    moved: dict[str, int] = {}
    counts: dict[str, int] = {}
    for kind in options.kinds:
        bits = dtype(kind).bits
        each = options.size**2 * bits // 8
        count = options.matrices or -(-4 * host().l3_bytes // each)
        exe = bw.compile(
            chain(kind, options.size, options.block, options.rows, count), threads=options.threads
        )
        feeds = {"x": np.ones((options.rows, options.size), np.float32)}
        sides[kind] = lambda exe=exe, feeds=feeds: exe.run(feeds)  # type: ignore[misc]
        moved[kind], counts[kind] = held_bytes(exe), count
        if bits == 4 and "onnxruntime i4" not in sides:
            session = onnxruntime_chain(
                options.size, options.block, options.rows, count, options.threads
            )
            if session is not None:
                sides["onnxruntime i4"] = session
                moved["onnxruntime i4"] = count * (each + options.size**2 // options.block * 4)
                counts["onnxruntime i4"] = count
    moved["memory, read"] = 4 * host().l3_bytes
    sides["memory, read"] = memory_reader(options.threads, moved["memory, read"])
    for run in sides.values():
        run()
    print(f"{options.rows} row(s), {options.size} x {options.size}, {options.threads} thread(s)")
    best = best_times(sides, options.seconds)
    memory = moved["memory, read"] / best["memory, read"]
    for name, seconds in best.items():
        rate = moved[name] / seconds
        each = f"{seconds / counts[name] * 1e3:7.3f} ms per product" if name in counts else " " * 20
        print(
            f"{name:16} {moved[name] / 2**20:7.1f} MiB  {each}  {rate / 1e9:6.2f} GB/s  "
            f"{rate / memory:5.0%}"
        )


if __name__ == "__main__":
    main()
