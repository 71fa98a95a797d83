"""Central differences in f64, and graphs of one op with a scalar loss."""

import numpy as np

from bitwright.errors import RunError
from bitwright.ir import dtype
from bitwright.ir.edit import replace_nodes
from bitwright.ir.graph import Graph
from bitwright.ir.types import TensorType
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run
from bitwright.ops.core.reverse import is_differentiable

WIDE = ("f64", "c128")
TOLERANCE = 1e-6
"""The largest error, relative to the sum of magnitudes along the direction."""


def stream(seed):
    """Random numbers apart from those of samples, which count seeds from 0.

    Weights drawn as x was are a multiple of x, and norms have no gradient in that direction.
    """
    return np.random.default_rng([7919, seed])


class NotSmoothError(Exception):
    """The loss has no derivative near these inputs."""


def widened(array):
    """Floats as f64, complex numbers as c128, everything else as it is."""
    if array is None:
        return None
    element = dtype(array.dtype)
    if element.is_float:
        return array.astype(np.float64)
    return array.astype(np.complex128) if element.is_complex else array


def _wide_type(type_):
    return type_.with_dtype(dtype("f64")) if type_.dtype.name == "f32" else type_


def widened_attrs(attrs):
    """Attributes whose bodies compute in f64."""
    return {k: widened_body(v) if isinstance(v, Graph) else v for k, v in attrs.items()}


def widened_body(graph):
    """The graph with f64 in place of f32."""

    def change(node):
        attrs = widened_attrs(node.attrs)
        if "value" in attrs:
            attrs["value"] = widened(attrs["value"])
        return node.with_(attrs=attrs, types=tuple(map(_wide_type, node.types)))

    return replace_nodes(graph, change, bodies=False)


def projected(op, inputs, attrs, seed=3, wide=True):
    """A graph of one node whose loss is a random projection of its float and complex results.

    Returns the graph, its inputs by name and the names of the differentiable ones. With `wide`,
    only results in f64 and c128 take part: others are too coarse for differences.
    """
    b = Builder(op.name)
    feeds = {f"in{i}": x for i, x in enumerate(inputs) if x is not None}
    values = [
        None if x is None else b.input(f"in{i}", TensorType(dtype(x.dtype), x.shape))
        for i, x in enumerate(inputs)
    ]
    node = b.node(op.name, values, attrs, [])
    arrays = run(b.build(**{f"y{i}": y for i, y in enumerate(node.outputs)}), feeds)
    b.outputs.clear()
    chosen = {
        f"y{i}": y
        for i, y in enumerate(node.outputs)
        if is_differentiable(y) and (not wide or y.dtype.name in WIDE)
    }
    total = projection(b, chosen, {name: np.shape(arrays[name]) for name in chosen}, seed)
    names = [v.name for v in values if is_differentiable(v)]
    if total is None:
        return None, feeds, names
    return b.build(loss=total), feeds, connected(b.nodes, total, names)


def projection(b, values, shapes, seed):
    """The sum of all elements of real and imaginary parts times random weights; None of nothing."""
    rng, total = stream(seed), None
    for name, y in values.items():
        for part in (b.real(y), b.imag(y)) if y.dtype.is_complex else (y,):
            weights = rng.uniform(0.5, 1.5, shapes[name])
            weighted = b.mul(part, weights.astype(part.dtype.numpy))
            axes = tuple(range(y.rank))
            summed = b.cast(b.reduce_sum(weighted, axes=axes, keepdims=False), to="f64")
            total = summed if total is None else b.add(total, summed)
    return total


def connected(nodes, target, names):
    """The names of values on which the target depends."""
    needed = {target}
    for node in reversed(nodes):
        if any(value in needed for value in node.outputs):
            needed.update(node.operands)
    found = {value.name for value in needed}
    return [name for name in names if name in found]


def random_direction(arrays, seed=5):
    """A random array for each array, of its shape and type."""
    rng, found = stream(seed), {}
    for name, array in arrays.items():
        step = rng.uniform(-1, 1, array.shape)
        if np.iscomplexobj(array):
            step = step + 1j * rng.uniform(-1, 1, array.shape)
        found[name] = step.astype(array.dtype)
    return found


def dot(gradient, direction):
    """The derivative along a direction; a complex gradient is d/d real + i d/d imag."""
    return float(np.sum(np.real(np.conj(gradient) * direction)))


def size_of(gradient, direction):
    """The sum of magnitudes in `dot`, to which errors are relative."""
    return float(np.sum(np.abs(gradient * direction)))


def directional(graph, feeds, direction, steps=(1e-4, 5e-5)):
    """The loss's derivative along a direction.

    Two step sizes are combined so that the error of third order cancels. Where the differences of
    both sides or of both steps disagree, there is a kink: `NotSmoothError`.
    """

    def loss(step):
        moved = {n: feeds[n] + step * d for n, d in direction.items()}
        return float(run(graph, {**feeds, **moved})["loss"])

    at = loss(0.0)
    ahead, behind = [loss(h) for h in steps], [loss(-h) for h in steps]
    if not np.isfinite([at, *ahead, *behind]).all():
        raise NotSmoothError("the loss is not finite")
    # differences of second order: h² f'' in a smooth point, h |jump of f'| at a kink
    bends = [a + z - 2 * at for a, z in zip(ahead, behind, strict=True)]
    coarse, fine = ((a - z) / (2 * h) for a, z, h in zip(ahead, behind, steps, strict=True))
    noise = 1e-14 * max(abs(at), 1e-3)
    if abs(bends[1]) > 0.3 * abs(bends[0]) + 10 * noise:
        raise NotSmoothError("the loss has a kink")
    if abs(coarse - fine) > 1e-4 * max(abs(coarse), abs(fine)) + noise / steps[1] * 10:
        raise NotSmoothError("the loss bends too much")
    return (4 * fine - coarse) / 3


def _finite(x, rng):
    return np.where(np.isfinite(x), x, rng.uniform(-1, 1, x.shape))


# What is tried in turn until the loss is smooth: the sample itself, infinities replaced, a little
# noise against ties and kinks, and positive numbers.
NUDGES = (
    lambda x, rng: x,
    _finite,
    lambda x, rng: _finite(x, rng) + rng.uniform(-0.05, 0.05, x.shape),
    lambda x, rng: _finite(x, rng) * 0.5 + rng.uniform(0.01, 0.05, x.shape),
    lambda x, rng: np.abs(_finite(x, rng)) + rng.uniform(0.1, 0.2, x.shape),
)


def nudged(feeds, names, attempt):
    """The feeds with the differentiable inputs changed for this attempt."""
    rng = stream(100 + attempt)
    changed = {n: NUDGES[attempt](feeds[n], rng).astype(feeds[n].dtype) for n in names}
    return {**feeds, **changed}


def compare(graph, backward, feeds, names, name):
    """The size of the gradient of one input; fails unless it agrees with differences.

    All of `names` move away from kinks. Raises `NotSmoothError` where no attempt succeeds. Where
    terms cancel along a direction, which hides errors, others are compared too.
    """
    for attempt in range(len(NUDGES)):
        given = nudged(feeds, names, attempt)
        gradient = None
        try:
            for seed in (5, 6, 7):
                direction = random_direction({name: given[name]}, seed)
                expected = directional(graph, given, direction)
                if gradient is None:
                    gradient = run(backward, given)[f"grad.{name}"]
                    assert gradient.shape == given[name].shape
                found, size = dot(gradient, direction[name]), size_of(gradient, direction[name])
                assert abs(found - expected) <= TOLERANCE * max(size, abs(expected), 1e-3)
                if abs(found) >= 0.1 * size:
                    break
        except (NotSmoothError, RunError) as error:
            reason = str(error)
            if gradient is None:
                continue
        return size
    raise NotSmoothError(reason)
