"""Lowering of if, loop and scan; `build` compiles their bodies like the outer graph."""

from __future__ import annotations

from bitwright.backends.cpu.lowering.context import Lowering, RegionView, lowers
from bitwright.ir.graph import Node


@lowers("if", "loop", "scan")
def lower_control(ctx: Lowering, node: Node, region: RegionView) -> None:
    ctx.control(node)
