"""Compiles products and convolutions for GPUs that are not there; prints a JSON object of reports.

A process of its own: Triton's interpreter, which the other tests use, cannot compile.
"""

import json
import os
from dataclasses import asdict

os.environ["TRITON_INTERPRET"] = "0"

import numpy as np

import bitwright as bw
from bitwright.backends.gpu.codegen.static import compile_static
from bitwright.backends.gpu.lowering.build import build
from bitwright.backends.gpu.lowering.context import Machine
from bitwright.backends.gpu.passes import GPU
from bitwright.passes.manager import run_passes
from bitwright.pipeline import INFERENCE

HOPPER = Machine("H200", (9, 0), interpreted=False)
AMPERE = Machine("A100", (8, 0), 108, 163 << 10, 40 << 20, interpreted=False)


def int8_layer(rows, depth, columns):
    b = bw.Builder("int8")
    y = b.integer_matmul(b.input("x", f"i8[{rows}, {depth}]"), b.constant(integers(depth, columns)))
    y = b.mul(b.cast(y, to="f32"), b.input("s", f"f32[{rows}, 1]"))
    y = b.add(b.mul(y, b.constant(floats(columns))), b.constant(floats(columns)))
    return b.build(y=b.requantize(b.relu(y), to="i8"))


def half_layer(rows, depth, columns):
    b = bw.Builder("bf16")
    x = b.input("x", f"bf16[{rows}, {depth}]")
    return b.build(y=b.relu(b.matmul(x, b.constant(floats(depth, columns), "bf16"))))


def int4_row():
    b = bw.Builder("row")
    q = b.constant(integers(2048, 1536).astype("int4"))
    scale = b.constant(floats(2048, 12))
    return b.build(y=b.dequant_matmul(b.input("x", "bf16[1, 1536]"), q, scale, block=128))


def int4_rows():
    b = bw.Builder("rows")
    q = b.constant(integers(256, 512).astype("int4"))
    scale = b.constant(floats(256, 4))
    return b.build(y=b.dequant_matmul(b.input("x", "bf16[64, 512]"), q, scale, block=128))


def int8_conv():
    b = bw.Builder("conv")
    w = b.constant(integers(64, 64, 3, 3))
    y = b.integer_conv(b.input("x", "i8[8, 64, 28, 28]"), w, pads=(1, 1, 1, 1))
    y = b.relu(b.mul(b.cast(y, to="f32"), b.constant(floats(64, 1, 1))))
    return b.build(y=b.requantize(y, to="i8"))


def integers(*shape):
    return np.random.default_rng(0).integers(-8, 8, shape).astype(np.int8)


def floats(*shape):
    return np.random.default_rng(0).random(shape, np.float32)


CASES = {
    "int8 on sm_90": (int8_layer(4096, 768, 3072), HOPPER),
    "int8 on sm_80": (int8_layer(4096, 768, 3072), AMPERE),
    "bf16 on sm_90": (half_layer(4096, 768, 768), HOPPER),
    "int4 row on sm_90": (int4_row(), HOPPER),
    "int4 rows on sm_90": (int4_rows(), HOPPER),
    "int8 convolution on sm_90": (int8_conv(), HOPPER),
}


def print_reports(cases):
    """Compile the kernels of (graph, device) by name."""
    found = {}
    for name, (graph, machine) in cases.items():
        lowered = run_passes(run_passes(graph, INFERENCE), GPU)
        artifact = build(lowered, machine)
        for step in artifact.schedule.steps:
            source = artifact.kernels[step.kernel]
            report = compile_static(source, source.configs[0], machine.capability, sizes=step.sizes)
            found[f"{name}: {source.family}"] = asdict(report)
    print(json.dumps(found))


if __name__ == "__main__":
    print_reports(CASES)
