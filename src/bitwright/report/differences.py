"""`bw.diff`: explains how two quantized models differ, layer by layer.

Layers are matched by name; those that are left, in order, by op and shape of the weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bitwright.frontend.load import load
from bitwright.quant.core.measure import quality
from bitwright.report.compare import Comparison, compare, file_bytes
from bitwright.report.layer_facts import LayerFacts, Quantization, layers_of

SAME_RATIO = 1e-6
"""Scales whose ratio is nearer to 1 are equal."""


@dataclass
class LayerDiff:
    """What differs between the two forms of one layer; an empty list means nothing."""

    name: str
    other_name: str
    op: str
    changes: list[str] = field(default_factory=list)
    weight_sqnr_db: float | None = None
    """Of the second weight against the first; None if they are equal or not comparable."""
    values_changed: int | None = None
    """Quantized values that differ, if both weights have the same zero point form."""
    values: int = 0
    bytes: tuple[int, int] = (0, 0)


@dataclass
class ModelDiff:
    """Two models compared: matched layers, layers that only one has, sizes and outputs."""

    layers: list[LayerDiff] = field(default_factory=list)
    only_first: list[str] = field(default_factory=list)
    only_second: list[str] = field(default_factory=list)
    file_bytes: tuple[int, int] | None = None
    outputs: Comparison | None = None

    @property
    def changed(self) -> list[LayerDiff]:
        return [layer for layer in self.layers if layer.changes]

    @property
    def is_same(self) -> bool:
        return not (self.changed or self.only_first or self.only_second)

    def to_json(self) -> dict[str, Any]:
        facts = {k: v for k, v in asdict(self).items() if k != "outputs"}
        outputs = None if self.outputs is None else self.outputs.as_json()["outputs"]
        return {**facts, "is_same": self.is_same, "outputs": outputs}

    def summary(self) -> str:
        """Counts and sizes in one line."""
        text = f"{len(self.layers)} layers matched, {len(self.changed)} differ"
        for names, which in ((self.only_first, "first"), (self.only_second, "second")):
            if names:
                text += f"; {len(names)} only in the {which}"
        if self.file_bytes is not None:
            a, b = self.file_bytes
            text += f"; files {a:,} -> {b:,} bytes ({b / max(1, a):.3f})"
        return text

    def __str__(self) -> str:
        lines = []
        for layer in self.changed:
            other = f" / {layer.other_name}" if layer.other_name != layer.name else ""
            lines.append(f"{layer.name}{other} ({layer.op})")
            lines += [f"    {change}" for change in layer.changes]
        for names, which in ((self.only_first, "first"), (self.only_second, "second")):
            lines += [f"{name}: only in the {which} model" for name in names]
        for name, found in (self.outputs.outputs if self.outputs else {}).items():
            lines.append(f"output {name}: {found.sqnr_db:.1f} dB, cosine {found.cosine:.6f}")
        return "\n".join([*lines, self.summary()])


def diff(first: Any, second: Any, data: Any = None, **options: Any) -> ModelDiff:
    """How the second model differs from the first; models are graphs, quantized models or paths.

    With `data` the outputs are compared too; the options are those of `bw.compare`.
    """
    sides = [list(layers_of(load(model))) for model in (first, second)]
    found = ModelDiff()
    pairs, found.only_first, found.only_second = _matched(*sides)
    found.layers = [_compare(a, b) for a, b in pairs]
    if all(isinstance(model, (str, Path)) for model in (first, second)):
        found.file_bytes = file_bytes(Path(first)), file_bytes(Path(second))
    if data is not None:
        found.outputs = compare(first, second, data, layers=False, **options)
    return found


def _matched(
    first: list[LayerFacts], second: list[LayerFacts]
) -> tuple[list[tuple[LayerFacts, LayerFacts]], list[str], list[str]]:
    """Pairs in the order of the first model, and the names of layers without a partner."""
    others = {layer.name: layer for layer in second}
    partner = {a.name: others[a.name] for a in first if a.name in others}
    taken = {b.name for b in partner.values()}
    left = [b for b in second if b.name not in taken]
    for a in (a for a in first if a.name not in partner):
        same = (b for b in left if (b.op, b.shape) == (a.op, a.shape))
        if (b := next(same, None)) is not None:
            partner[a.name] = b
            left.remove(b)
    pairs = [(a, partner[a.name]) for a in first if a.name in partner]
    return pairs, [a.name for a in first if a.name not in partner], [b.name for b in left]


def _compare(a: LayerFacts, b: LayerFacts) -> LayerDiff:
    found = LayerDiff(a.name, b.name, a.op, bytes=(a.nbytes, b.nbytes))
    changes = found.changes
    if a.op != b.op:
        changes.append(f"op {a.op} -> {b.op}")
    if a.scheme != b.scheme:
        changes.append(f"scheme {a.scheme} -> {b.scheme}")
    changes += _parameter_changes("weight", a.quantization, b.quantization)
    if a.bits != b.bits:
        changes.append(f"weight {a.bits} -> {b.bits} bits, {a.nbytes:,} -> {b.nbytes:,} bytes")
    changes += _weight_changes(found, a, b)
    changes += _parameter_changes("activation", a.activation, b.activation)
    return found


def _weight_changes(found: LayerDiff, a: LayerFacts, b: LayerFacts) -> Iterator[str]:
    p, q = a.distances(), b.distances()
    if p is not None and q is not None and p.shape == q.shape:
        found.values, found.values_changed = p.size, int((p != q).sum())
    before, after = a.weight(), b.weight()
    if before is None or after is None:
        return
    if before.shape != after.shape:
        yield f"weight shape {list(before.shape)} -> {list(after.shape)}"
        return
    near = quality(before, after).sqnr
    if not math.isfinite(near) and near > 0:
        return
    found.weight_sqnr_db = float(near)
    text = f"weights: {near:.1f} dB between them"
    if found.values_changed is not None:
        text += f", {found.values_changed:,} of {found.values:,} quantized values differ"
    yield text


def _parameter_changes(what: str, a: Quantization | None, b: Quantization | None) -> Iterator[str]:
    if a is None or b is None:
        if a is not b:
            sides = ["float" if side is None else _text(side) for side in (a, b)]
            yield f"{what} {sides[0]} -> {sides[1]}"
        return
    if a.dtype != b.dtype:
        yield f"{what} type {a.dtype} -> {b.dtype}"
    if a.scale.size != b.scale.size:
        yield f"{what} scales: {a.granularity} -> {b.granularity}"
    elif a.scale.size:
        ratio = (b.scale.reshape(-1) / a.scale.reshape(-1)) if (a.scale != 0).all() else np.ones(1)
        if np.abs(ratio - 1).max() > SAME_RATIO:
            yield f"{what} scale ratio {_spread(ratio)}"
    zeros = [_centered(side) for side in (a, b)]
    if zeros[0].size != zeros[1].size or (zeros[0] != zeros[1]).any():
        yield f"{what} zero point {_zero_text(a)} -> {_zero_text(b)}"


def _centered(side: Quantization) -> Any:
    """Zero points from the middle of the type: u8 around 128 equals i8 around 0."""
    middle = 128 if side.dtype == "u8" else 8 if side.dtype == "u4" else 0
    zero = np.zeros(1, np.int64) if side.zero is None else side.zero.astype(np.int64).reshape(-1)
    return np.unique(zero - middle)


def _zero_text(side: Quantization) -> str:
    values = np.unique(np.zeros(1, np.int64) if side.zero is None else side.zero.reshape(-1))
    text = ", ".join(str(int(v)) for v in values[:3]) + (", …" if values.size > 3 else "")
    return f"{text} ({side.dtype})"


def _spread(ratio: Any) -> str:
    if ratio.size == 1:
        return f"{float(ratio[0]):.4g}"
    return f"{ratio.min():.4g} to {ratio.max():.4g}, median {np.median(ratio):.4g}"


def _text(side: Quantization) -> str:
    scales = "" if not side.scale.size else f", scales: {side.granularity}"
    return f"{side.how} {side.dtype}{scales}"
