"""GFLOP/s of the attention kernels on one thread, f32 and int8, vs. PyTorch and ONNX Runtime.

    python benchmarks/attention.py [--target avx2] [--seconds 1.0] [BxHxSxTxD ...]

The best call of each side; calls are interleaved. The f32 peak is that of `benchmarks/matmul.py`.
Causal attention counts skipped products too, so its rate may exceed the peak.
"""

from __future__ import annotations

import argparse

import numpy as np
import onnxruntime
import torch
from matmul import Peak, best_times
from movement import Call, native
from onnx import TensorProto, helper

from bitwright.ir.dtype import f32
from bitwright.ir.graph import Graph
from bitwright.ir.types import TensorType
from bitwright.ops.core.builder import Builder
from bitwright.target import named

SHAPES = ("1x2x128x128x32", "1x2x128x128x64", "1x2x197x197x64", "1x1x256x256x32")
SHAPES += ("1x1x256x256x64", "1x1x512x512x32", "1x1x512x512x64", "1x1x512x512x128")
SHAPES += ("1x12x1x512x64", "1x12x4x512x64")
Array = np.ndarray


def graph_of(q: Array, k: Array, causal: bool, int8: bool) -> Graph:
    b = Builder("attention")
    types = (("q", q), ("k", k), ("v", k))
    values = [b.input(name, TensorType(f32, x.shape)) for name, x in types]
    return b.build(y=b.attention(*values, causal=causal, int8=int8))


def onnx_call(q: Array, k: Array, v: Array) -> Call:
    """ONNX Runtime's own op, which takes [B, S, H·D]."""
    batches, heads, _, features = q.shape
    names = ["q", "k", "v"]
    node = helper.make_node(
        "MultiHeadAttention", names, ["y"], domain="com.microsoft", num_heads=heads
    )
    shapes = [(batches, x.shape[2], heads * features) for x in (q, k, k)]
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in zip(names, shapes, strict=True)
    ]
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, shapes[0])
    graph = helper.make_graph([node], "attention", inputs, [result])
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    binding = session.io_binding()
    for name, x, shape in zip(names, (q, k, v), shapes, strict=True):
        merged = np.ascontiguousarray(x.transpose(0, 2, 1, 3)).reshape(shape)
        binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(merged))
    binding.bind_output("y")
    return lambda: session.run_with_iobinding(binding)


def torch_call(q: Array, k: Array, v: Array, causal: bool) -> Call:
    tensors = [torch.from_numpy(x) for x in (q, k, v)]
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda: attend(*tensors, is_causal=causal)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shapes", nargs="*", default=SHAPES)
    parser.add_argument("--target", default="host")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--causal", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    target = named(options.target)
    peak, best = Peak(target), 0.0
    print(f"{target.cpu}, target {target}, one thread, GFLOP/s")
    names = (f"{name:>8}" for name in ("ours", "of peak", "int8", "torch", "ort"))
    print(f"{'B x H x S x T x D':>20}", *names)
    rng = np.random.default_rng(0)
    for shape in options.shapes:
        batches, heads, queries, keys, features = map(int, shape.split("x"))
        q, k, v = (
            rng.normal(size=(batches, heads, count, features)).astype(np.float32)
            for count in (queries, keys, keys)
        )
        calls = [
            native(graph_of(q, k, options.causal, int8), {"q": q, "k": k, "v": v}, target)
            for int8 in (False, True)
        ]
        others = torch_call(q, k, v, options.causal), onnx_call(q, k, v)
        times = best_times(options.seconds, *calls, *others)
        best = max(best, peak.flops / best_times(options.seconds / 4, peak)[0] / 1e9)
        flops = 4 * batches * heads * queries * keys * features
        ours, int8, other, runtime = (flops / seconds / 1e9 for seconds in times)
        print(
            f"{shape:>20} {ours:8.1f} {100 * ours / best:7.0f}% {int8:8.1f} {other:8.1f} "
            f"{'-' if options.causal else f'{runtime:.1f}':>8}"
        )


if __name__ == "__main__":
    main()
