"""The proof in a file: what it holds, its bytes, and where they are.

    ONNX   metadata "bitwright.proof", appended after the graph: other runtimes ignore it
    .bw    after the arrays: the proof, its length (8 bytes), "BWPROOF1"

The text is base64 of zlib of JSON. Reading is bounded: no size in it is trusted.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from onnx import ModelProto, StringStringEntryProto

from bitwright.errors import BitwrightError
from bitwright.frontend.onnx.read import ModelFile, map_file, read_model
from bitwright.frontend.onnx.regions import PROOF_KEY
from bitwright.ir import container
from bitwright.ir.arrays import Array
from bitwright.ir.container import write_atomically
from bitwright.ir.dtype import DTYPES
from bitwright.proof.golden import MOST_ELEMENTS, InputSpec

MAGIC = b"BWPROOF1"
VERSION = 1
MOST_BYTES = 1 << 26
"""The largest proof, decompressed."""


@dataclass(frozen=True)
class GoldenOutput:
    """One output: its type, a digest of all its bits, and some of its values."""

    dtype: str
    shape: tuple[int, ...]
    digest: str
    samples: str = ""
    """Values at equal distances, as base64 of little-endian f32 (f64 for wide integers)."""

    def sampled(self) -> Array:
        raw = base64.b64decode(self.samples)
        return np.frombuffer(raw, "<f8" if self.dtype in WIDE else "<f4")


WIDE = ("i32", "i64", "u32", "u64", "f64")
"""Outputs of these types are sampled in f64."""


@dataclass
class Proof:
    digests: str = ""
    """8 characters for each weight, in the order of their names."""
    structure: str = ""
    """A digest of everything but the weights."""
    seed: int = 0
    inputs: list[InputSpec] = field(default_factory=list)
    arrays: dict[str, str] = field(default_factory=dict)
    """The user's own inputs, if they asked to store them."""
    outputs: dict[str, GoldenOutput] = field(default_factory=dict)
    without: str = ""
    """Why there are no golden outputs."""
    layers: list[tuple[str, str, float | None]] = field(default_factory=list)
    """Name, scheme and measured SQNR in dB of each layer."""
    provenance: dict[str, Any] = field(default_factory=dict)

    def golden_inputs(self) -> dict[str, Array]:
        """The golden inputs by name."""
        feeds = {spec.name: spec.array(self.seed) for spec in self.inputs if not self.arrays}
        for spec in self.inputs if self.arrays else ():
            raw = base64.b64decode(self.arrays[spec.name])
            feeds[spec.name] = np.frombuffer(raw, DTYPES[spec.dtype].numpy).reshape(spec.shape)
        return feeds

    def to_text(self) -> str:
        plain = json.dumps({"version": VERSION, **asdict(self)}, separators=(",", ":"))
        return base64.b64encode(zlib.compress(plain.encode(), 9)).decode()


def from_text(text: str, where: str) -> Proof:
    """The proof of a text that `to_text` made; an error for any other."""
    try:
        packed = base64.b64decode(text, validate=True)
        reader = zlib.decompressobj()
        plain = reader.decompress(packed, MOST_BYTES)
        if reader.unconsumed_tail or not reader.eof:
            raise ValueError(f"it is incomplete or larger than {MOST_BYTES:,} bytes")
        return _checked(json.loads(plain))
    except (ValueError, TypeError, KeyError, AttributeError, zlib.error, RecursionError) as error:
        raise BitwrightError(
            f"the proof in the file is damaged: {error}",
            where=where,
            hint="Save the model again, or compare with the original file.",
        ) from None


def _checked(given: Mapping[str, Any]) -> Proof:
    """A proof whose fields have the right types."""
    fields = dict(given)
    if fields.pop("version") != VERSION:
        raise ValueError(f"version {given['version']} is not {VERSION}")
    inputs: Any = fields.pop("inputs", [])
    outputs: Any = fields.pop("outputs", {})
    proof = Proof(**fields)
    proof.inputs = [
        InputSpec(str(s["name"]), _dtype(s["dtype"]), _shape(s["shape"]), s["low"], s["high"])
        for s in inputs
    ]
    for name, o in outputs.items():
        digest, samples = str(o["digest"]), str(o["samples"])
        golden = GoldenOutput(_dtype(o["dtype"]), _shape(o["shape"]), digest, samples)
        proof.outputs[str(name)] = golden
    proof.layers = [(str(n), str(s), None if d is None else float(d)) for n, s, d in proof.layers]
    texts = (proof.digests, proof.structure, proof.without, *proof.arrays.values())
    if not all(isinstance(text, str) for text in texts) or not isinstance(proof.seed, int):
        raise ValueError("a field has another type")
    if not isinstance(proof.provenance, dict):
        raise ValueError("the provenance is no table")
    for output in proof.outputs.values():
        output.sampled()
    if not all(np.isfinite([spec.low, spec.high]).all() for spec in proof.inputs):
        raise ValueError("a range is not finite")
    proof.golden_inputs()
    return proof


def _dtype(name: Any) -> str:
    if not isinstance(name, str) or name not in DTYPES or name == "string":
        raise ValueError(f"{name!r} is no element type")
    return name


def _shape(sizes: Any) -> tuple[int, ...]:
    total = 1
    for size in sizes:
        if not isinstance(size, int) or size < 0:
            raise ValueError(f"{size!r} is no size")
        total *= size
    if total > MOST_ELEMENTS or len(sizes) > 16:
        raise ValueError("an array is too large")
    return tuple(sizes)


def is_container(path: Path) -> bool:
    """Whether the file is in bitwright's own format."""
    with open(path, "rb") as file:
        return file.read(len(container.MAGIC)) == container.MAGIC


def append_proof(path: Path, proof: Proof) -> None:
    """Add the proof to a file, which is replaced as a whole."""
    text = proof.to_text()
    if is_container(path):
        tail = text.encode() + len(text).to_bytes(8, "little") + MAGIC
    else:
        entry = StringStringEntryProto(key=PROOF_KEY, value=text)
        tail = ModelProto(metadata_props=[entry]).SerializeToString()

    def write(file: IO[bytes]) -> None:
        with open(path, "rb") as source:
            while piece := source.read(1 << 22):
                file.write(piece)
        file.write(tail)

    write_atomically(path, write)


def read_proof(path: Path) -> tuple[Proof | None, ModelFile | None]:
    """The proof of a file, and its parsed ONNX model; None for what it does not have."""
    where = f"file {path.name!r}"
    try:
        own = is_container(path)
    except OSError as error:
        raise BitwrightError(f"cannot read {path}: {error.strerror or error}") from None
    if not own:
        file = read_model(path)
        entries = [p.value for p in file.proto.metadata_props if p.key == PROOF_KEY]
        return (from_text(entries[-1], where) if entries else None), file
    data = map_file(path, where)
    if bytes(data[-8:]) != MAGIC:
        return None, None
    length = int.from_bytes(data[-16:-8], "little")
    if length > len(data) - 16:
        raise BitwrightError("the proof in the file is damaged: its length is wrong", where=where)
    return from_text(bytes(data[-16 - length : -16]).decode("ascii", "replace"), where), None
