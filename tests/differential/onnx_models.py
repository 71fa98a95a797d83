"""A random ONNX model from a seed, and the sizes that it is run with."""

from __future__ import annotations

import onnx_steps_elements
import onnx_steps_moves
import onnx_steps_others
import onnx_steps_quantized
import onnx_steps_rows
import onnx_steps_window
from onnx_growing import F16, F32, F64, Growing

KINDS = {
    "windows": onnx_steps_window.STEPS,
    "rows": onnx_steps_rows.STEPS,
    "quantized": onnx_steps_quantized.STEPS,
    "elements": onnx_steps_elements.STEPS,
    "moves": onnx_steps_moves.STEPS,
    "others": onnx_steps_others.STEPS,
}
LIGHT = [*onnx_steps_elements.STEPS, *onnx_steps_moves.STEPS, *onnx_steps_others.STEPS[-3:]]


def random_model(seed: int) -> Growing:
    """Some steps of one kind with others between them; a single step often."""
    g = Growing(seed)
    kind = g.pick("windows", "windows", "rows", "rows", "quantized", "quantized", *KINDS)
    steps = KINDS[kind]
    if kind != "quantized":
        g.real = g.pick(*[F32] * 12, F64, F16)
    wanted = g.pick(1, 1, 1, 2, 2, 3, 4, 6)
    for _ in range(20):
        if len(g.nodes) >= wanted:
            break
        chosen = LIGHT if g.nodes and g.chance(0.4) else steps
        chosen[g.random.integers(len(chosen))](g)
    return g


def bindings(g: Growing) -> list[dict[str, int]]:
    """Sizes of the runs: one executable meets several, and the first again."""
    if not any(isinstance(s, str) for v in g.inputs for s in v.shape):
        return [{}]
    found = [{"n": g.pick(1, 2, 3), "h": g.pick(4, 5, 9)}]
    for _ in range(g.integer(1, 3)):
        found.append({"n": g.pick(0, 1, 1, 2, 3, 5), "h": g.pick(1, 1, 2, 3, 7)})
    return [*found, found[0]]
