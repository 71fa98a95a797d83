"""Which samples do not run in ONNX Runtime 1.31.1, and why. Entries are "op-number" of a sample, or
"op type" for an op on an element type."""

NO_ONNX_FORM = {
    "conj", "real", "imag", "squared_norm", "complex", "fft",
    "cast-11", "cast-12", "matmul-9",
}  # fmt: skip
"""No ONNX op computes with complex numbers."""

RANDOM = {"random_uniform", "random_normal", "bernoulli", "multinomial"}
"""Draws differ; only their type is compared."""

CRASHES_ORT: set[str] = set()
"""The process dies: recurrences and scans over no steps, unique of nothing."""

DIFFERS_IN_ORT: set[str] = set()

DIFFERS_IN_BOTH: set[str] = set()

NO_RUNTIME: set[str] = set()

NOT_IN_ORT: set[str] = set()
