"""The inner loop of `quant.model.weights.gptq`, compiled; it vectorizes over columns."""

from __future__ import annotations

from bitwright.ir.arrays import Array
from bitwright.quant.calibration.machine_code import ADDRESS, NUMBER, MachineCode

FEWEST_COLUMNS = 8
"""With fewer columns, numpy's loops over groups are faster."""


_FUNCTIONS = MachineCode(
    "term rounding", "term_rounding", {"round_terms_f32": (*[ADDRESS] * 4, *[NUMBER] * 6)}
)


def round_terms(
    rest: Array, scales: Array, upper: Array, qvalues: Array, lowest: int, highest: int
) -> None:
    """Quantize [groups, terms, columns] weights `rest` into `qvalues`; `rest` becomes the errors.

    Columns are contiguous in every array; `upper` is [groups, terms, terms].
    """
    function = _FUNCTIONS["round_terms_f32"]
    _, terms, columns = rest.shape
    for own, scale, factor, q in zip(rest, scales, upper, qvalues, strict=True):
        pointers = (array.ctypes.data for array in (own, scale, factor, q))
        strides = (array.strides[0] // array.itemsize for array in (scale, factor))
        function(*pointers, terms, columns, *strides, lowest, highest)
