"""The exceptions of the package. Every fault a user can cause is one of these.

A message says what is wrong, where, what was expected and found, and what to do next, in that
order; parts that are unknown are left out.
"""


class BitwrightError(Exception):
    """Base of all errors raised on purpose."""

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
    """A graph that breaks a rule of the IR: structure, arity, types, cycles."""


class ParseError(BitwrightError):
    """Text or bytes that are not a graph."""


class InferenceError(GraphError):
    """Operands whose types or shapes an op does not accept."""


class RunError(BitwrightError):
    """A fault at run time: inputs that do not fit, indices out of range, no memory."""


class RewriteError(BitwrightError):
    """Rules that do not terminate, or a pass that broke the graph."""


class ImportModelError(BitwrightError):
    """A model file that cannot be read."""


class UnsupportedError(ImportModelError):
    """A valid model that asks for something bitwright does not have."""


class ExportError(BitwrightError):
    """A graph that the chosen file format cannot hold, or an output that cannot be written."""


class CompileError(BitwrightError):
    """Code that cannot be generated: ill-typed, not for this target, refused by LLVM."""


class CalibrationError(BitwrightError):
    """Data, statistics or entries that calibration cannot use."""


class QuantizationError(BitwrightError):
    """Parameters that contradict each other, or data that cannot be quantized as asked."""
