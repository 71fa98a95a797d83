"""Checkpoints: all states of a training step and the position in the data, in one file.

A checkpoint is a safetensors file with the states by name. Its metadata has the settings of the
run, the progress and a digest of both and of all contents. Files are written atomically; the last
`keep` stay, and `best.safetensors` holds the weights of the best evaluation.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bitwright.errors import BitwrightError, TrainingError
from bitwright.frontend.safetensors import read_safetensors
from bitwright.ir.container import require_writable
from bitwright.ir.edit import replace_nodes
from bitwright.ir.graph import Graph, Node
from bitwright.ir.printer import to_text
from bitwright.train.data import Position
from bitwright.train.safetensors_file import as_bytes, read_metadata, write_safetensors

Array = np.ndarray[Any, Any]
_NAME = re.compile(r"step-(\d{9,})\.safetensors")
KIND, VERSION = "bitwright training checkpoint", "1"
BEST = "best.safetensors"


@dataclass
class Progress:
    """How far a run is; everything that is not a state of the step."""

    step: int = 0
    position: Position = field(default_factory=Position)
    best: float | None = None
    best_step: int = 0
    stale: int = 0
    """Evaluations since the best one."""
    evaluated: int = 0
    """The step of the last evaluation."""
    metric: str = ""
    """The metric of `best`."""
    start_step: int = 0
    """The step at which the call of `fit` began, from which its `steps` count."""
    start_epoch: int = 0
    epoch_length: int | None = None
    """The batches of an epoch, if they are known; `position` counts in them."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Progress:
        found = json.loads(text)
        return cls(**{**found, "position": Position(**found["position"])})


class Checkpoints:
    """The checkpoints of a run in a folder, one every `every` steps."""

    def __init__(self, folder: str | Path, every: int | None = None, keep: int = 3) -> None:
        if keep < 1 or (every is not None and every < 1):
            raise TrainingError("every and keep are at least 1", found=f"{every}, {keep}")
        self.folder, self.every, self.keep = Path(folder), every, keep

    def paths(self) -> list[Path]:
        """The checkpoints in the folder, oldest first."""
        return _numbered(self.folder)

    def prepare(self) -> None:
        """Make the folder; raise a `TrainingError` if it cannot be written.

        Files that a killed process left unfinished are removed.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            require_writable(self.folder / BEST)
        except (OSError, BitwrightError) as error:
            raise TrainingError(
                f"checkpoints cannot be written to {self.folder}: {error}"
            ) from None
        for left in self.folder.glob(".*.safetensors.*"):
            if _NAME.match(left.name[1:]) or left.name.startswith(f".{BEST}."):
                left.unlink(missing_ok=True)

    def require_latest(self, step: int) -> None:
        """Raise a `TrainingError` if there are checkpoints of later steps, of another course."""
        later = [path.name for path in self.paths() if _step_of(path) > step]
        if later:
            raise TrainingError(
                f"{self.folder} has checkpoints after step {step}: {', '.join(later)}",
                hint="Remove them to continue from the earlier one, or choose another folder.",
            )

    def save(
        self, states: Mapping[str, Array], progress: Progress, settings: Mapping[str, str]
    ) -> Path:
        """Write a checkpoint, then remove those beyond `keep`."""
        path = self.folder / f"step-{progress.step:09d}.safetensors"
        write_checkpoint(path, states, progress, settings)
        for old in self.paths()[: -self.keep]:
            old.unlink(missing_ok=True)
        return path

    def latest(self) -> Path | None:
        found = self.paths()
        return found[-1] if found else None

    def save_best(
        self, weights: Mapping[str, Array], progress: Progress, settings: Mapping[str, str]
    ) -> None:
        write_checkpoint(self.folder / BEST, weights, progress, settings)


def write_checkpoint(
    path: Path, states: Mapping[str, Array], progress: Progress, settings: Mapping[str, str]
) -> None:
    """Write states, progress and settings with a digest."""
    ordered = {name: states[name] for name in sorted(states)}
    meta = {
        "kind": KIND,
        "version": VERSION,
        "progress": progress.to_json(),
        "settings": json.dumps(dict(settings), sort_keys=True),
    }
    write_safetensors(path, ordered, {**meta, "digest": _digest(ordered, meta)})


def read_checkpoint(
    path: Path, settings: Mapping[str, str] | None = None
) -> tuple[dict[str, Array], Progress]:
    """The states and the progress of a checkpoint of a run with these settings."""
    try:
        ordered, meta = _intact(path)
    except _DamagedError as error:
        raise TrainingError(str(error), hint=_advice(path)) from None
    if settings is not None:
        _require_same(path, json.loads(meta["settings"]), settings)
    return ordered, Progress.from_json(meta["progress"])


class _DamagedError(Exception):
    """A file that is no whole checkpoint."""


def _intact(path: Path) -> tuple[dict[str, Array], dict[str, str]]:
    """The states and the metadata of a checkpoint whose digest fits."""
    try:
        arrays = read_safetensors(path)
        meta = read_metadata(path)
    except (BitwrightError, OSError, ValueError, AttributeError) as error:
        raise _DamagedError(f"checkpoint {path.name} cannot be read: {error}") from None
    if meta.get("kind") != KIND:
        raise TrainingError(
            f"{path.name} is not a training checkpoint",
            hint="bw.load_parameters(graph, path) loads plain weights.",
        )
    if meta.get("version") != VERSION:
        raise TrainingError(
            f"checkpoint {path.name} has another format",
            expected=f"version {VERSION}",
            found=f"version {meta.get('version')}",
        )
    digest = meta.pop("digest", "")
    ordered = {name: arrays[name] for name in sorted(arrays)}
    if digest != _digest(ordered, meta):
        raise _DamagedError(f"checkpoint {path.name} is damaged: its digest does not fit")
    return ordered, meta


def structure_of(graph: Graph) -> str:
    """A digest of a graph with its constants, without the values that training changes."""

    def change(node: Node) -> Node:
        attrs = node.attrs
        if node.op in ("parameter", "state"):
            attrs = {name: value for name, value in attrs.items() if name != "value"}
        return node.with_(attrs=attrs, loc="")

    text = to_text(replace_nodes(graph.with_(meta={}), change))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _digest(arrays: Mapping[str, Array], meta: Mapping[str, str]) -> str:
    found = hashlib.blake2b(json.dumps(dict(meta), sort_keys=True).encode(), digest_size=16)
    for name, array in arrays.items():
        found.update(f"{name}:{array.dtype}:{array.shape}".encode())
        found.update(as_bytes(array))
    return found.hexdigest()


def _advice(path: Path) -> str:
    """What to do about a damaged checkpoint: the newest other one that is intact."""
    for other in reversed(_numbered(path.parent)):
        if other != path:
            try:
                _intact(other)
            except (_DamagedError, TrainingError):
                continue
            return f"Remove it to resume from {other.name}."
    return ""


def _numbered(folder: Path) -> list[Path]:
    """The files of a folder that are named like checkpoints, by step."""
    return sorted((p for p in folder.glob("step-*") if _NAME.fullmatch(p.name)), key=_step_of)


def _step_of(path: Path) -> int:
    found = _NAME.match(path.name)
    return int(found[1]) if found else -1


def _require_same(path: Path, theirs: Mapping[str, str], ours: Mapping[str, str]) -> None:
    """Raise a `TrainingError` for a checkpoint of a run with other settings."""
    for name in sorted({*theirs, *ours}):
        if theirs.get(name) != ours.get(name):
            raise TrainingError(
                f"checkpoint {path.name} belongs to another run: its {name} differs",
                expected=_short(ours.get(name)),
                found=_short(theirs.get(name)),
            )


def _short(text: str | None, most: int = 200) -> str:
    text = text or "none"
    return text if len(text) <= most else f"{text[:most]}…"
