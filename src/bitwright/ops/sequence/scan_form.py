"""A scan written as a function of one step, for the composed gradients of sequence ops.

    finals, rows = scan_over(b, states, sequences, captures, step)

`step(b, states, elements, captures)` appends the nodes of one step to the body's builder `b` and
returns the new states and the rows to stack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bitwright.ir.graph import Value
from bitwright.ir.types import TensorType
from bitwright.ops.core.builder import Builder

Values = Sequence[Value]
Step = Callable[[Builder, Values, Values, Values], tuple[Values, Values]]


def scan_over(
    b: Builder,
    states: Values,
    sequences: Values,
    captures: Values,
    step: Step,
    reverse: bool = False,
) -> tuple[list[Value], list[Value]]:
    """The final states and the stacked rows; `reverse` starts at the end of all sequences."""
    body = Builder("step", parent=b)

    def inputs(kind: str, values: Values, skip: int) -> list[Value]:
        types = (TensorType(v.dtype, v.shape[skip:]) for v in values)
        return [body.input(f"{kind}{i}", type_) for i, type_ in enumerate(types)]

    given = (
        inputs("state", states, 0),
        inputs("element", sequences, 1),
        inputs("given", captures, 0),
    )
    after, rows = step(body, *given)
    # an output of its own for each result, also where a step returns one value twice
    outputs = {
        f"{kind}{i}": v for kind, vs in (("out", after), ("row", rows)) for i, v in enumerate(vs)
    }
    made = b.node(
        "scan",
        (*states, *sequences, *captures),
        {
            "body": body.build(**outputs),
            "carried": len(states),
            "scanned": len(sequences),
            "input_directions": (int(reverse),) * len(sequences),
            "output_directions": (int(reverse),) * len(rows),
        },
        [],
    ).outputs
    return list(made[: len(states)]), list(made[len(states) :])
