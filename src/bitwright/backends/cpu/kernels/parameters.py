"""The compile-time parameters of a kernel, as a key that determines its code."""

from __future__ import annotations

import dataclasses
from typing import Any

from bitwright.backends.cpu.lowering.region import Part, Reads


class KernelParameters:
    """A base class of frozen dataclasses."""

    @property
    def key(self) -> tuple[Any, ...]:
        """All fields; expressions and the strides of operands instead of the values they read."""
        fields = (getattr(self, field.name) for field in dataclasses.fields(self))  # type: ignore[arg-type]
        return tuple(
            v.expression if isinstance(v, Part) else v.key if isinstance(v, Reads) else v
            for v in fields
        )
