"""Gradients at other shapes than those of samples: axes of size 1, empty axes, random sizes and
broadcast operands, for every op that takes them."""

from dataclasses import replace

import numpy as np
import pytest
from derived_cases import DIFFERENTIABLE, differentiated, grows, shape_variants, widest
from finite_differences import NotSmoothError, compare, projected
from near import assert_compiled_agrees

from bitwright.errors import BitwrightError, GraphError
from bitwright.ops.core.interpret import run
from bitwright.ops.core.opdef import Kind

# Ops whose samples allow no other sizes, and the reason.
FIXED = {
    **dict.fromkeys(("if", "loop", "fused"), "bodies declare the types of operands"),
    "cast": "its first samples have no result in f64",
    **dict.fromkeys(("random_uniform", "random_normal"), "no operand has a gradient"),
    **dict.fromkeys(
        ("avg_pool_backward", "reshape", "expand", "resize"), "an attribute has the result's shape"
    ),
    "one_hot": "depth and values have fixed sizes",
    "resize_backward": "sizes follow from scales",
}
# Ops that write at indices: an element written twice has no defined gradient, so sizes only shrink
# to 0 and 1.
WRITES = ("scatter_elements", "scatter_nd", "tensor_scatter", "max_unpool")


def accepted(op, case, wide=True):
    """Variants of a sample that the op takes: name, graph, feeds and differentiable names."""
    for name, inputs in shape_variants(list(case.inputs)):
        if op.name in WRITES and not name.endswith(("to 0", "to 1")):
            continue
        try:
            with np.errstate(all="ignore"):
                make = widest if wide else projected
                options = {} if wide else {"wide": False}
                graph, feeds, names = make(op, inputs, case.attrs, **options)
        except BitwrightError:
            continue
        if graph is not None and names:
            yield name, inputs, graph, feeds, names


def check_variants(op, case):
    """The names of variants that were accepted; every gradient agrees with differences."""
    found = []
    for variant, _, graph, feeds, names in accepted(op, case):
        try:
            backward, names = differentiated(graph, names)
        except GraphError as error:
            if not grows(error):
                raise
            continue
        for name in names:
            try:
                with np.errstate(all="ignore"):
                    compare(graph, backward, feeds, names, name)
            except NotSmoothError:  # the mean of nothing is not a number
                assert run(backward, feeds)[f"grad.{name}"].shape == feeds[name].shape
            except AssertionError as error:
                raise AssertionError(f"{variant}, by {name}") from error
        found.append(variant)
    return found


@pytest.mark.parametrize("op", DIFFERENTIABLE.values(), ids=DIFFERENTIABLE)
def test_gradient_at_other_shapes(op):
    """Of the first two samples: sizes 0, 1 and random ones; elementwise ops broadcast."""
    found = [name for case in list(op.samples())[:2] for name in check_variants(op, case)]
    if op.name in FIXED:
        return
    assert any(name.endswith("to 1") for name in found)
    assert any(name.endswith("to 0") for name in found)
    if op.kind is Kind.ELEMENTWISE and len(op.operands) > 1:
        assert any("without axis" in name for name in found)


@pytest.mark.exhaustive
@pytest.mark.parametrize("op", DIFFERENTIABLE.values(), ids=DIFFERENTIABLE)
def test_gradient_at_other_shapes_of_every_sample(op):
    if op.name in FIXED:
        pytest.skip(FIXED[op.name])
    for case in list(op.samples())[2:]:
        check_variants(op, case)


@pytest.mark.slow
@pytest.mark.parametrize("op", DIFFERENTIABLE.values(), ids=DIFFERENTIABLE)
def test_compiled_gradient_at_other_shapes(op):
    """One variant with an empty axis and one of a random size, compiled in the sample's types."""
    case, wanted = next(iter(op.samples())), {"empty", "random"}
    for variant, inputs, graph, feeds, names in accepted(op, case, wide=False):
        size = variant.rpartition(" to ")[2]
        kind = "empty" if size == "0" else "random"
        if kind in wanted and size.isdigit() and size != "1":
            wanted.remove(kind)
            assert_compiled_agrees(op, replace(case, inputs=tuple(inputs)), graph, feeds, names)
