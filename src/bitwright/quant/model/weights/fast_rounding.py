"""The inner loop of `quant.model.weights.gptq` as machine code, for columns enough to fill a vector."""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.quant.calibration.machine_code import ADDRESS, NUMBER, MachineCode
from bitwright.target import Target

Array = np.ndarray[Any, Any]
FEWEST_COLUMNS = 8
"""With fewer, and groups many, numpy's loops over the groups are the longer ones."""


def _text(target: Target) -> str:
    # the emitter is slow to import, and a warm start does not need it
    from bitwright.backends.cpu.kernels.calibration.term_rounding import term_rounding_text

    return term_rounding_text(target)


_FUNCTIONS = MachineCode(
    "term rounding", _text, {"round_terms_f32": (*[ADDRESS] * 4, *[NUMBER] * 6)}
)


def round_terms(
    rest: Array, steps: Array, upper: Array, qvalues: Array, lowest: int, highest: int
) -> None:
    """Codes of [groups, terms, columns] weights; `rest` holds the errors then.

    Columns lie side by side in every array; `upper` is [groups, terms, terms].
    """
    function = _FUNCTIONS["round_terms_f32"]
    _, terms, columns = rest.shape
    for own, step, share, code in zip(rest, steps, upper, qvalues, strict=True):
        pointers = (array.ctypes.data for array in (own, step, share, code))
        strides = (array.strides[0] // array.itemsize for array in (step, share))
        function(*pointers, terms, columns, *strides, lowest, highest)
