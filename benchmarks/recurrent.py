"""Milliseconds of compiled recurrent layers, vs. ONNX Runtime.

    python benchmarks/recurrent.py [--threads 1] [--seconds 1.0] [OP-SxBxIxH ...]

The best call of each side. Sides run one after the other in rounds with pauses, so that spinning
threads of one do not occupy the cores of the other. `lstmb` (a trailing `b`) is bidirectional.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

import bitwright

CASES = ("lstm-50x1x256x256", "lstmb-40x1x96x48", "lstmb-100x1x512x256", "lstm-30x16x128x128")
CASES += ("gru-50x1x256x256", "grub-40x8x64x100", "rnn-50x1x256x256")
ROUNDS = 3
GATES = {"rnn": 1, "gru": 3, "lstm": 4}


def model_of(case: str) -> tuple[onnx.ModelProto, np.ndarray]:
    op, sizes = case.split("-")
    steps, batch, features, hidden = map(int, sizes.split("x"))
    directions = 2 if op.endswith("b") else 1
    op = op.removesuffix("b")
    rng = np.random.default_rng(0)
    rows = GATES[op] * hidden
    arrays = {
        "w": rng.standard_normal((directions, rows, features)) * features**-0.5,
        "r": rng.standard_normal((directions, rows, hidden)) * hidden**-0.5,
        "b": rng.standard_normal((directions, 2 * rows)) * 0.1,
    }
    attrs = {"hidden_size": hidden, "direction": "bidirectional" if directions == 2 else "forward"}
    if op == "gru":
        attrs["linear_before_reset"] = 1  # what PyTorch exports
    node = helper.make_node(op.upper(), ["x", *arrays], ["y"], **attrs)
    x = rng.standard_normal((steps, batch, features)).astype(np.float32)
    graph = helper.make_graph(
        [node],
        "recurrent",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (steps, directions, batch, hidden))],
        [numpy_helper.from_array(a.astype(np.float32), name) for name, a in arrays.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), x


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", default=CASES)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1.0)
    given = parser.parse_args()
    for case in given.cases:
        model, x = model_of(case)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = given.threads
        session = onnxruntime.InferenceSession(model.SerializeToString(), options)
        executable = bitwright.compile(bitwright.load(model), threads=given.threads)
        sides = {
            "bitwright": lambda: executable.run({"x": x})["y"],  # noqa: B023
            "onnxruntime": lambda: session.run(None, {"x": x})[0],  # noqa: B023
        }
        found = [call() for call in sides.values()]
        assert np.allclose(*found, rtol=1e-3, atol=1e-5)
        best = dict.fromkeys(sides, float("inf"))
        for name, call in [*sides.items()] * ROUNDS:
            time.sleep(0.05)
            end = time.perf_counter() + given.seconds / ROUNDS
            while (start := time.perf_counter()) < end:
                call()
                best[name] = min(best[name], time.perf_counter() - start)
        times = "  ".join(f"{name} {1e3 * t:8.3f} ms" for name, t in best.items())
        print(f"{case:24} {times}  ratio {best['onnxruntime'] / best['bitwright']:.2f}")


if __name__ == "__main__":
    main()
