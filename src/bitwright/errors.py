"""The exceptions of the package; every user error is one of these.

A message says what is wrong, where, what was expected and found, and what to do next, in that
order. Unknown parts are omitted.
"""


class BitwrightError(Exception):
    """Base class of all errors of the package."""

    def __init__(
        self,
        what: str,
        *,
        where: str = "",
        expected: object = None,
        found: object = None,
        hint: str = "",
    ) -> None:
        self.what, self.where, self.hint = what, where, hint
        self.expected, self.found = expected, found
        text = f"{where}: {what}" if where else what
        if expected is not None:
            text += f"; expected {expected}"
        if found is not None:
            text += f", found {found}" if expected is not None else f"; found {found}"
        if hint:
            text += f". {hint}"
        super().__init__(text)


class GraphError(BitwrightError):
    """An invalid graph: structure, arity, types, cycles."""


class ParseError(BitwrightError):
    """Text or bytes that are not a valid graph."""


class InferenceError(GraphError):
    """Operand types or shapes that an op does not accept."""


class RunError(BitwrightError):
    """An error at run time: invalid inputs, indices out of range, no memory."""


class NonFiniteError(RunError):
    """A gradient that holds NaN or infinity where that is an error."""


class RewriteError(BitwrightError):
    """Rules that do not terminate, or a pass that made the graph invalid."""


class ImportModelError(BitwrightError):
    """A model file that cannot be read."""


class UnsupportedError(ImportModelError):
    """A valid model that uses an unsupported feature."""


class ExportError(BitwrightError):
    """A graph that the file format cannot represent, or a file that cannot be written."""


class CompileError(BitwrightError):
    """An error of code generation: wrong types, unsupported target, LLVM errors."""


class CalibrationError(BitwrightError):
    """Invalid calibration data, statistics or entries."""


class QuantizationError(BitwrightError):
    """Inconsistent quantization parameters, or data that cannot be quantized with them."""


class TrainingError(BitwrightError):
    """Training that cannot start or go on: settings, data, checkpoints, a non-finite loss."""
