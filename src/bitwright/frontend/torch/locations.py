"""Source locations of the nodes of a traced program, and the list of unsupported nodes."""

from __future__ import annotations

import re
from typing import Any

from torch import fx
from torch._ops import HigherOrderOperator

from bitwright.errors import UnsupportedError

_FRAME = re.compile(r'File "([^"<]+)", line (\d+)')


def target_name(target: Any) -> str:
    """The qualified name of what a node calls: `aten.add.Tensor`, `higher_order.cond`."""
    if isinstance(target, HigherOrderOperator):
        higher_order: Any = target  # its `name` is not typed
        return f"higher_order.{higher_order.name()}"
    return str(target) if hasattr(target, "_schema") else getattr(target, "__name__", str(target))


def op_name(node: fx.Node) -> str:
    """The op that the user called: the node's own, or the one that was decomposed to it."""
    name = target_name(node.target)
    return str(node.meta.get("original_aten", name)) if name.startswith("prims.") else name


def module_path(node: fx.Node) -> str:
    """The submodule that a node belongs to, as in `layers.0.attention`."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]) if stack else ""


def location_of(node: fx.Node) -> str:
    """A node in error messages: op, name, submodule and source line of the model."""
    text = f"{op_name(node)} (node {node.name!r}"
    if path := module_path(node):
        text += f" in {path!r}"
    return text + f"{_source_line(node)})"


def _source_line(node: fx.Node) -> str:
    """The innermost line outside of torch.nn, else inside."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [frame for frame in frames if "/torch/nn/" not in frame[0]] or frames
    return f", {own[-1][0].rsplit('/', 1)[-1]} line {own[-1][1]}" if own else ""


class Problems:
    """Collects the nodes that cannot be imported, for one error that lists them all."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], list[fx.Node]] = {}

    def add(self, node: fx.Node, reason: str) -> None:
        self._found.setdefault((op_name(node), reason), []).append(node)

    def __bool__(self) -> bool:
        return bool(self._found)

    def error(self, name: str) -> UnsupportedError:
        lines = []
        for (_, reason), nodes in self._found.items():
            times = "once" if len(nodes) == 1 else f"{len(nodes)} times, first"
            lines.append(f"\n  {location_of(nodes[0])}, {times}: {reason}")
        count = len(self._found)
        return UnsupportedError(
            f"{count} {'use' if count == 1 else 'uses'} of PyTorch ops cannot be imported:"
            + "".join(lines),
            where=f"module {name!r}",
        )
