"""The table of all ops: the `OPDEFS` of every module below `ops`."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache

import bitwright.ops as package
from bitwright.errors import GraphError
from bitwright.ir.graph import nearest
from bitwright.ops.core.opdef import OpDef


@cache
def all_ops() -> Mapping[str, OpDef]:
    """Every op by name."""
    found: dict[str, OpDef] = {}
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        module = importlib.import_module(info.name)
        for opdef in getattr(module, "OPDEFS", ()):
            if opdef.name in found:
                raise GraphError(f"op {opdef.name!r} is declared twice", where=module.__name__)
            found[opdef.name] = opdef
    return found


def get(name: str) -> OpDef:
    ops = all_ops()
    if name not in ops:
        raise GraphError(f"no op is named {name!r}", hint=nearest(name, ops))
    return ops[name]
