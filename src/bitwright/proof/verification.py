"""`bw.verify_file`: reruns the proof of a model file on this machine, and in other runtimes.

    digests    of each weight and of the rest of the file: a difference names the weight
    bitwright  the golden outputs again: equal bits, or a stated distance where float ops round
               differently on this processor
    runtimes   each layer alone, on the values that bitwright computes before it; then the outputs

A layer differs if its distance from bitwright is above the limits below. The limit for outputs is
the distance between two ways in which bitwright itself runs the file: its own ops, and the nodes
one by one, as another runtime runs them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bitwright.compiler import compile as compile_model
from bitwright.errors import BitwrightError
from bitwright.frontend.load import load
from bitwright.frontend.onnx.read import ModelFile
from bitwright.ir.arrays import Array
from bitwright.ir.dtype import dtype
from bitwright.proof import digests
from bitwright.proof.attach import golden_output, sample
from bitwright.proof.layer_runs import LayerDifference, LayerRuns
from bitwright.proof.record import Proof, read_proof
from bitwright.proof.runtimes import RuntimeRefusalError, load_model, require_runtime, version
from bitwright.quant.core.measure import quality

OWN_DB = 40.0
"""The least SQNR of bitwright's outputs against the recorded ones, if bits differ."""
MARGIN_DB, HIGHEST_DB = 8.0, 30.0
"""Outputs of another runtime may be this much further from bitwright than expected."""
NO_PROOF_HINT = "Quantized.save writes one, unless proof=False."


@dataclass(frozen=True)
class Check:
    """One result: what was checked, "ok", "failed" or "skipped", and the facts."""

    name: str
    status: str
    detail: str


@dataclass
class Verification:
    """The checks of one file; `is_ok` if none failed."""

    path: str
    checks: list[Check] = field(default_factory=list)
    differences: list[LayerDifference] = field(default_factory=list)
    """Layers that another runtime computes differently, in the order that they run in."""
    provenance: dict[str, Any] = field(default_factory=dict)
    layers: list[tuple[str, str, float | None]] = field(default_factory=list)
    """Name, scheme and SQNR of each layer as the file records them."""

    @property
    def is_ok(self) -> bool:
        return all(check.status != "failed" for check in self.checks)

    @property
    def first_difference(self) -> LayerDifference | None:
        return self.differences[0] if self.differences else None

    def add(self, name: str, is_ok: bool, detail: str) -> None:
        self.checks.append(Check(name, "ok" if is_ok else "failed", detail))

    def to_json(self) -> dict[str, Any]:
        return {"is_ok": self.is_ok, **asdict(self)}

    def __str__(self) -> str:
        lines = [f"{c.status:7} {c.name}: {c.detail}" for c in self.checks]
        verdict = "verified" if self.is_ok else "NOT VERIFIED"
        return "\n".join([*lines, f"{self.path}: {verdict}"])


def verify_file(
    path: str | Path,
    runtimes: str | Iterable[str] = (),
    *,
    layers: bool = True,
    threads: int | None = None,
) -> Verification:
    """Rerun the proof of a model file, in bitwright and in these runtimes.

    `runtimes` are "onnxruntime" and "openvino". `layers=False` compares their outputs only.
    """
    path = Path(path)
    names = [runtimes] if isinstance(runtimes, str) else list(runtimes)
    for name in names:
        require_runtime(name)
    proof, file = read_proof(path)
    if proof is None:
        raise BitwrightError(f"{path} carries no proof", hint=NO_PROOF_HINT)
    found = Verification(str(path), provenance=proof.provenance, layers=proof.layers)
    _check_digests(found, path, proof, file)
    if not found.is_ok:
        return found
    if not proof.outputs:
        why = proof.without or "the file has no golden outputs"
        found.checks.append(Check("outputs", "skipped", why))
        return found
    feeds = proof.golden_inputs()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own = compile_model(path, threads=threads).run(feeds)
        _check_own_outputs(found, proof, own)
        if file is not None and names:
            _check_runtimes(found, path, file, feeds, own, names, layers)
        elif names:
            found.checks.append(Check("runtimes", "skipped", "other runtimes read only ONNX files"))
    return found


def _check_digests(found: Verification, path: Path, proof: Proof, file: ModelFile | None) -> None:
    if file is not None:
        now, structure = digests.onnx_digests(file), digests.onnx_structure(file)
    else:
        graph = load(path)
        now, structure = digests.graph_digests(graph), digests.graph_structure(graph)
    width = digests.WIDTH
    recorded = [proof.digests[i : i + width] for i in range(0, len(proof.digests), width)]
    if len(recorded) != len(now):
        found.add("weights", False, f"the file has {len(now)}, the proof {len(recorded)}")
    else:
        changed = [n for (n, d), r in zip(now.items(), recorded, strict=True) if d != r]
        detail = f"{len(now)} digests agree" if not changed else _named_weights(changed, file)
        found.add("weights", not changed, detail)
    if file is None and not found.is_ok:
        return  # the text of a graph contains digests of its arrays
    same = structure == proof.structure
    found.add("graph", same, "its digest agrees" if same else "nodes or attributes have changed")


def _named_weights(changed: list[str], file: ModelFile | None, most: int = 4) -> str:
    readers: dict[str, str] = {}
    for node in () if file is None else file.proto.graph.node:
        for name in node.input:
            readers.setdefault(name, node.name or node.op_type)
    texts = [f"{n!r}" + (f" (read by {readers[n]!r})" if n in readers else "") for n in changed]
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return f"{', '.join(texts[:most])}{more} differ from what was saved"


def _check_own_outputs(found: Verification, proof: Proof, own: Mapping[str, Any]) -> None:
    for name, golden in proof.outputs.items():
        array = own.get(name)
        label = f"output {name!r} in bitwright"
        if array is None:
            found.add(label, False, "the model has no such output")
            continue
        count = golden.sampled().size
        again = golden_output(array, count)
        if (again.dtype, again.shape) != (golden.dtype, golden.shape):
            kinds = [f"{o.dtype}{list(o.shape)}" for o in (golden, again)]
            found.add(label, False, f"recorded as {kinds[0]}, computed as {kinds[1]}")
        elif again.digest == golden.digest:
            found.add(label, True, f"the same bits ({array.size:,} values)")
        else:
            near = quality(golden.sampled(), sample(array, count)).sqnr if count else -math.inf
            detail = f"{near:.1f} dB from the recorded values, at least {OWN_DB:g} required"
            found.add(label, near >= OWN_DB, detail)


def _check_runtimes(
    found: Verification,
    path: Path,
    file: ModelFile,
    feeds: Mapping[str, Array],
    own: Mapping[str, Array],
    names: list[str],
    layers: bool,
) -> None:
    """Compare each layer, then the outputs."""
    runs = LayerRuns(file, feeds, names if layers else [])
    nodes_alone = runs.run()
    for name in names:
        label = version(name)
        if layers:
            _report_layers(found, label, runs, name)
        try:
            outputs = load_model(name, path)(feeds)
        except RuntimeRefusalError as error:
            found.add(f"outputs in {label}", False, str(error))
            continue
        for output, array in own.items():
            expected = _distance(array, nodes_alone.get(output))
            limit = min(HIGHEST_DB, expected - MARGIN_DB)
            given = _distance(array, outputs.get(output))
            detail = f"{_decibels(given)} from bitwright, at least {limit:.1f} dB required"
            found.add(f"output {output!r} in {label}", given >= limit, detail)


def _report_layers(found: Verification, label: str, runs: LayerRuns, name: str) -> None:
    differences = [one for one in runs.differences if one.runtime == name]
    found.differences += differences
    if differences:
        found.add(f"layers in {label}", False, f"first difference: {differences[0]}")
    else:
        detail = f"{runs.compared[name]} compared one by one, the worst {runs.worst_text(name)}"
        found.add(f"layers in {label}", True, detail)
    for refused in runs.refused.get(name, [])[:1]:
        count = len(runs.refused[name])
        found.add(f"layers that {label} does not run", False, f"{count}, first {refused}")


def _decibels(number: float) -> str:
    return "no distance" if number == math.inf else f"{number:.1f} dB"


def _distance(exact: Array, other: Array | None) -> float:
    """The SQNR in dB; -inf for another shape or other values that are not finite."""
    if other is None or exact.shape != other.shape:
        return -math.inf
    if not dtype(exact.dtype).is_float:
        same = float((exact == other).mean()) if exact.size else 1.0
        return math.inf if same == 1.0 else quality(exact, other).sqnr
    if not np.array_equal(np.isfinite(exact), np.isfinite(other)):
        return -math.inf
    return quality(exact, other).sqnr
