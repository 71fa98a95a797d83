"""Models quantized with f8-dynamic: float8 products, rows quantized in one kernel, no fallback."""

import numpy as np
import pytest
from on_gpu import compiled

import bitwright as bw

RNG = np.random.default_rng(0)


def floats(*shape):
    return RNG.normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("scheme", ["dynamic_per_token", "static"])
@pytest.mark.parametrize("precision", [None, "mixed_bf16"])
def test_model(scheme, precision):
    b = bw.Builder("layers")
    x = b.input("x", "f32[batch, 32]")
    y = b.layer_norm(x, floats(32), floats(32))
    h = b.gelu(b.add(b.matmul(y, b.parameter("w1", floats(32, 48))), floats(48)))
    graph = b.build(y=b.add(x, b.matmul(h, b.parameter("w2", floats(48, 32)))))
    data = [{"x": floats(16, 32)} for _ in range(4)]
    recipe = {"base": "f8-dynamic", "schemes": {"*": scheme}}
    quantized = bw.quantize(graph, data=data, recipe=recipe)
    exe = compiled(quantized.graph, precision=precision)
    families = {source.family for source in exe.engine.artifact.sources.values()}
    assert any("f8" in name and "matmul" in name for name in families), families
    want = bw.compile(quantized.graph, target="reference").run(data[0])["y"]
    got = exe.run(data[0])["y"].astype(np.float32)
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < (4e-2 if precision else 1e-2)
