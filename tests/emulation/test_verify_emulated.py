"""`bitwright verify` on an emulated processor without VNNI names the layer that saturates."""

import json

import numpy as np
import pytest
from test_emulation import QEMU, emulated, machine

import bitwright as bw

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(QEMU is None, reason="qemu-x86_64 (Debian: qemu-user) is not installed"),
    pytest.mark.skipif(not machine().is_x86, reason="compares with x86 processors"),
]


def two_layers():
    """Only the second layer has neighbouring weights of full size and one sign."""
    rng = np.random.default_rng(0)
    small = rng.normal(size=(64, 64)).astype(np.float32) / 64
    small[0] = 4 * np.abs(small).max()  # the others stay below half of the scale
    b = bw.Builder("two")
    h = b.relu(b.matmul(b.input("x", "f32[n, 4, 64]"), small, name="small"))
    large = np.full((64, 16), 0.1, np.float32)
    large[:, 1::2] = -0.1
    return b.build(y=b.matmul(b.add(h, 1.0), large, name="large"))


@pytest.mark.parametrize("weight_type", ["i8", "u8"])
def test_the_saturating_layer_is_named(weight_type, tmp_path):
    rng = np.random.default_rng(1)
    data = [{"x": rng.uniform(0, 1, (8, 4, 64)).astype(np.float32)} for _ in range(4)]
    path = tmp_path / "two.onnx"
    bw.quantize(two_layers(), data, recipe="int8-static").save(path, weight_type=weight_type)
    result = emulated(
        "Haswell", "-m", "bitwright", "verify", path, "--with", "onnxruntime", "--json"
    )
    assert result.stdout, result.stderr
    found = json.loads(result.stdout)
    own = [c for c in found["checks"] if "in bitwright" in c["name"]]
    assert [c["status"] for c in own] == ["ok"]
    if weight_type == "u8":
        assert result.returncode == 0 and found["is_ok"], found
        return
    assert result.returncode == 1
    assert found["differences"], found["checks"]
    first = found["differences"][0]
    assert first["weight"] == "large.weight" and "saturation" in first["reason"], found
    assert len(found["differences"]) == 1
