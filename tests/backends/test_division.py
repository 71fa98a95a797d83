"""Division by a common divisor with multiplications has the bits of a division."""

import numpy as np
import pytest
from run_kernel import TARGETS, function, named

from bitwright.backends.cpu.codegen.emit import Module, Signature, f32
from bitwright.backends.cpu.codegen.math.division import divider


def divided(x, divisors, target):
    """Each vector of x divided by its own divisor."""
    module, lanes = Module(target, "divide"), target.lanes(32)
    with module.kernel("divide", Signature(("x", "d", "y"), ("count",))) as f:
        x_, d_, y_ = (f.args.pointer(name) for name in "xdy")
        with f.loop(0, f.args.size("count"), lanes) as loop:
            by_divisor = divider(f, f.load(f32, d_, loop.index), lanes)
            f.store(by_divisor(f.load(f32.vector(lanes), x_, loop.index)), y_, loop.index)
    y = np.empty_like(x)
    pointers = {"x": x.ctypes.data, "d": divisors.ctypes.data, "y": y.ctypes.data}
    table = module.signatures["divide"].pack(**pointers, count=x.size)
    function(module.text(), "divide", target)(table.ctypes.data, 0, 1)
    return y


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("most", [300, 1 << 14, 1 << 24])
def test_quotients_are_rounded_once(name, most):
    """Of integers, and of other numbers of the same magnitude."""
    rng, count = np.random.default_rng(most), 1 << 18
    x = rng.integers(-most, most + 1, count).astype(np.float32)
    divisors = np.repeat(rng.integers(1, most, count // 16).astype(np.float32), 16)
    for factor in (np.float32(1), rng.uniform(1, 2, count).astype(np.float32)):
        found = divided(x * factor, divisors, named(name))
        np.testing.assert_array_equal(found, x * factor / divisors)
