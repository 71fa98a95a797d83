"""Elementary functions of floats as polynomials: `exp(f, x)` emits into f and returns the result.

Every function takes f32 and f64 values of any number of lanes. Its module states its largest error
in units in the last place; tests/backends/test_vector_math.py checks it on every available target.
"""

from bitwright.backends.cpu.codegen.math.error_function import erf
from bitwright.backends.cpu.codegen.math.exponential import exp, expm1
from bitwright.backends.cpu.codegen.math.hyperbolic import (
    acosh,
    asinh,
    atanh,
    cosh,
    sigmoid,
    sinh,
    tanh,
)
from bitwright.backends.cpu.codegen.math.logarithm import log, log1p
from bitwright.backends.cpu.codegen.math.power import pow_, remainder
from bitwright.backends.cpu.codegen.math.trigonometric import acos, asin, atan, cos, sin, tan

__all__ = [
    "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "erf", "exp", "expm1", "log",
    "log1p", "pow_", "remainder", "sigmoid", "sin", "sinh", "tan", "tanh",
]  # fmt: skip
