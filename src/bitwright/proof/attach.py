"""Makes the proof of a saved model and appends it to the file.

The golden outputs are those of the file itself, loaded and compiled again. The proof takes at most
a fraction of the file: samples of outputs and the table of layers are left out of small files.
"""

from __future__ import annotations

import base64
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bitwright import __version__, target
from bitwright.compiler import compile as compile_model
from bitwright.errors import BitwrightError
from bitwright.frontend.load import load
from bitwright.frontend.onnx.read import ModelFile, read_model
from bitwright.ir.arrays import Array, as_array
from bitwright.ir.dtype import dtype, string
from bitwright.ir.graph import Graph
from bitwright.ops.core.registry import get
from bitwright.proof import digests
from bitwright.proof.golden import InputSpec, input_specs
from bitwright.proof.record import WIDE, GoldenOutput, Proof, append_proof, is_container
from bitwright.quant.data.extents import InputExtent
from bitwright.quant.model.report import QuantizationReport

FRACTION = 50
"""The proof takes at most one part in this of the file, or LEAST bytes."""
LEAST = 1024
SAMPLES = 512
FEWEST_SAMPLES = 16
MOST_STORED = 1 << 18
"""Bytes of the user's own inputs in a file."""
STATES = "bitwright.states"


def attach_proof(
    path: str | Path,
    report: QuantizationReport | None = None,
    extents: Mapping[str, InputExtent] | None = None,
    proof: bool | Mapping[str, Any] = True,
    consumer: str = "",
) -> None:
    """Append a proof to a model file; `proof` may be inputs to store, else they are synthetic."""
    path = Path(path)
    own = is_container(path)
    file = None if own else read_model(path)
    graph = load(path)
    made = Proof(provenance=_provenance(report, consumer))
    if file is None:
        found, made.structure = digests.graph_digests(graph), digests.graph_structure(graph)
    else:
        found, made.structure = digests.onnx_digests(file), digests.onnx_structure(file)
    made.digests = digests.joined(found.values())
    given = proof if isinstance(proof, Mapping) else None
    outputs = _golden(made, graph, extents or {}, _state_names(file), given)
    if report is not None:
        made.layers = [(r.name, r.scheme, _rounded(r.sqnr_db)) for r in report.layers]
    _fit(made, outputs, path.stat().st_size)
    append_proof(path, made)


def _provenance(report: QuantizationReport | None, consumer: str) -> dict[str, Any]:
    machine = target.machine()
    facts: dict[str, Any] = {"bitwright": __version__, "processor": machine.triple.split("-")[0]}
    if consumer:
        facts["consumer"] = consumer
    if report is not None:
        facts["recipe"] = report.recipe
        facts["held_out_batches"] = report.held_out_batches
        facts["output_sqnr_db"] = {n: _rounded(v) for n, v in report.output_sqnr_db.items()}
    return facts


def _rounded(decibels: float | None) -> float | None:
    return None if decibels is None or not np.isfinite(decibels) else round(float(decibels), 1)


def _state_names(file: ModelFile | None) -> frozenset[str]:
    entries = [] if file is None else [p for p in file.proto.metadata_props if p.key == STATES]
    return frozenset(json.loads(entries[-1].value)) if entries else frozenset()


def _golden(
    proof: Proof,
    graph: Graph,
    extents: Mapping[str, InputExtent],
    states: frozenset[str],
    given: Mapping[str, Any] | None,
) -> dict[str, Array]:
    """The golden outputs; sets the inputs of the proof, or the reason why there are none."""
    if not all(get(node.op).deterministic for _, node in graph.walk()):
        proof.without = "the model draws random numbers"
        return {}
    if given is not None:
        proof.inputs, proof.arrays = _own_inputs(given)
        return _run(graph, proof)
    try:
        choices = input_specs(graph, extents, states)
        for specs in choices:
            proof.inputs = specs
            try:
                return _run(graph, proof)
            except (BitwrightError, MemoryError) as error:
                proof.without = f"the model did not run on synthetic inputs: {error}"[:200]
    except BitwrightError as error:
        proof.without = str(error)
    proof.inputs = []
    return {}


def _own_inputs(given: Mapping[str, Any]) -> tuple[list[InputSpec], dict[str, str]]:
    specs, arrays = [], {}
    for name, value in given.items():
        array = np.ascontiguousarray(as_array(value))
        element = dtype(array.dtype)
        if element == string:
            raise BitwrightError(f"golden input {name!r} holds strings", expected="numbers")
        specs.append(InputSpec(name, element.name, array.shape, 0.0, 0.0))
        arrays[name] = base64.b64encode(array.tobytes()).decode()
    total = sum(map(len, arrays.values()))
    if total > MOST_STORED:
        raise BitwrightError(
            "the golden inputs are too large for the file",
            expected=f"at most {MOST_STORED * 3 // 4:,} bytes",
            found=f"{total * 3 // 4:,} bytes",
            hint="Give one sample.",
        )
    return specs, arrays


def _run(graph: Graph, proof: Proof) -> dict[str, Array]:
    """The outputs on the golden inputs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outputs = compile_model(graph).run(proof.golden_inputs())
    kept = {
        n: a for n, a in outputs.items() if isinstance(a, np.ndarray) and a.dtype != string.numpy
    }
    proof.without = "" if kept else "no output is numeric"
    return kept


def golden_output(array: Array, samples: int) -> GoldenOutput:
    """What the proof records of an output, with at most this number of its values."""
    name = dtype(array.dtype).name
    taken = sample(array, samples).astype("<f8" if name in WIDE else "<f4")
    text = base64.b64encode(taken.tobytes()).decode()
    return GoldenOutput(name, tuple(array.shape), digests.array_digest(array), text)


def sample(array: Array, count: int) -> Array:
    """At most `count` values at equal distances; real parts of complex values."""
    flat = np.real(array).reshape(-1)
    if flat.size <= count:
        return flat
    return flat[np.linspace(0, flat.size - 1, count).astype(np.int64)]


def _fit(proof: Proof, outputs: Mapping[str, Array], size: int) -> None:
    """Record as much of the outputs and layers as the size of the file allows."""
    allowed = max(LEAST, size // FRACTION)
    layers = proof.layers
    for count, table in ((SAMPLES, layers), (FEWEST_SAMPLES * 4, layers), (FEWEST_SAMPLES, layers)):
        proof.outputs = {name: golden_output(a, count) for name, a in outputs.items()}
        proof.layers = table
        if len(proof.to_text()) <= allowed:
            return
    proof.layers = []
