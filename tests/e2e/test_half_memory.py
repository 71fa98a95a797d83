"""Half precision halves what lies between the layers of a model."""

import numpy as np
import pytest

import bitwright as bw
from bitwright.lir.plan import plan

rng = np.random.default_rng(0)


def draw(*shape: int) -> np.ndarray:
    return (rng.normal(size=shape) / shape[-1] ** 0.5).astype(np.float32)


def encoder() -> bw.Graph:
    """Two layers of a transformer."""
    b = bw.Builder("encoder")
    x = b.input("x", "f32[1, 128, 96]")
    for layer in range(2):

        def linear(value: object, name: str, columns: int, layer: int = layer) -> object:
            weight = draw(value.shape[-1], columns)  # type: ignore[attr-defined]
            return b.matmul(value, b.parameter(f"{name}{layer}", weight))

        heads = [
            b.transpose(b.reshape(linear(x, n, 96), shape=(1, 128, 3, 32)), perm=(0, 2, 1, 3))
            for n in "qkv"
        ]
        y = b.transpose(b.attention(*heads), perm=(0, 2, 1, 3))
        x = b.add(x, linear(b.reshape(y, shape=(1, 128, 96)), "o", 96))
        x = b.layer_norm(x, b.parameter(f"scale{layer}", np.ones(96, np.float32)))
        x = b.add(x, linear(b.gelu(linear(x, "up", 384)), "down", 96))
    return b.build(y=x)


def network() -> bw.Graph:
    """Inverted residuals."""
    b = bw.Builder("network")
    x = b.input("x", "f32[1, 16, 24, 24]")
    for layer in range(2):
        wide = b.relu(b.conv(x, b.parameter(f"up{layer}", draw(96, 16, 1, 1))))
        wide = b.conv(wide, b.parameter(f"d{layer}", draw(96, 1, 3, 3)), groups=96, pads=[1] * 4)
        x = b.add(x, b.conv(b.relu(wide), b.parameter(f"down{layer}", draw(16, 96, 1, 1))))
    return b.build(y=x)


@pytest.mark.parametrize("make", [encoder, network])
@pytest.mark.parametrize("policy", ["mixed_bf16", "mixed", "f16"])
def test_what_lies_between_layers_is_halved(make, policy):
    totals = [
        plan(bw.compile(make(), precision=name).engine.schedule, {}).total
        for name in ("f32", policy)
    ]
    assert totals[1] <= 0.55 * totals[0]
