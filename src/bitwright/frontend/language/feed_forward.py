"""The gated layer: down(act(gate(x)) * up(x))."""

from __future__ import annotations

from bitwright.frontend.language.config import ModelConfig
from bitwright.frontend.language.weights import Weights
from bitwright.ir.graph import Value
from bitwright.ops.core.builder import Builder

_ACTIVATIONS: dict[str, tuple[str, dict[str, str]]] = {
    "silu": ("silu", {}),
    "relu": ("relu", {}),
    "gelu": ("gelu", {}),
    "gelu_tanh": ("gelu", {"approximate": "tanh"}),
}


def activate(b: Builder, name: str, x: Value) -> Value:
    op, attrs = _ACTIVATIONS[name]
    found: Value = b.op(op, x, **attrs)
    return found


def gated(w: Weights, c: ModelConfig, x: Value, name: str, suffix: str = "") -> Value:
    """The layer `name` on x[n, width]; its gate may be the first half of its up matrix."""
    b = w.b
    gate, up, down = (f"{name}.ffn_{part}{suffix}" for part in ("gate", "up", "down"))
    inner = inner_size(w, down)
    if f"{gate}.weight" in w:
        first, second = (w.linear(x, part, inner, c.width) for part in (gate, up))
    else:
        both = w.linear(x, up, 2 * inner, c.width)
        first, second = (
            b.slice(both, starts=(start,), stops=(start + inner,), steps=(1,), axes=(1,))
            for start in (0, inner)
        )
    return w.linear(b.mul(activate(b, c.activation, first), second), down, c.width, inner)


def inner_size(w: Weights, down: str) -> int:
    """The inputs of the matrix `down`; the width's check follows where it is used."""
    tensor = w.tensors.get(f"{down}.weight")
    return tensor.shape[-1] if tensor is not None and tensor.shape else 0
