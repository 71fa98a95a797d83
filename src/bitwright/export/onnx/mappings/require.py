"""Run-time checks. ONNX has no op that fails, but an index out of range does."""

from __future__ import annotations

from bitwright.export.onnx.mapping import Ref, Scope, exports
from bitwright.ir.dtype import i64


@exports("require", widens=False)
def require(e: Scope, condition: Ref, x: Ref, *, message: str) -> Ref:
    """Element 0 of the stack [x], or element 1, which does not exist."""
    place = e.cast(e.Not(condition), i64)
    return e.Gather(e.Unsqueeze(x, e.ints([0])), e.Reshape(place, e.ints([])), axis=0)
