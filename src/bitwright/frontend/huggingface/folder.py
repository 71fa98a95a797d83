"""Reads a Hugging Face folder: its configuration, and its tensors under the names of GGUF.

Nothing outside the folder is read: a file of the folder that is a link to another place is refused.
Arrays stay views of the mapped files, except experts that the folder keeps one by one, which are
stacked, and small vectors that change (`unit_offset`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bitwright.errors import ImportModelError, UnsupportedError
from bitwright.frontend.language.architectures import Architecture
from bitwright.frontend.language.config import ModelConfig
from bitwright.frontend.language.from_config import config_from_json
from bitwright.frontend.language.stored import StoredTensor
from bitwright.frontend.safetensors import read_index, read_safetensors
from bitwright.ir.dtype import dtype

Array = np.ndarray[Any, Any]
MAX_JSON = 1 << 28
_IGNORED = re.compile(
    r"rotary_emb\.inv_freq$|masked_bias$|attn\.bias$|position_ids$|^pooler\.|^cls\."
)
_INDEX = "model.safetensors.index.json"
_POOLING_FILE = "1_Pooling/config.json"
_POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_FLOATS = ("f32", "f16", "bf16")


@dataclass(frozen=True)
class HuggingFaceFolder:
    path: Path
    architecture: Architecture
    config: ModelConfig
    tensors: dict[str, StoredTensor]


def is_folder(path: Path) -> bool:
    return path.is_dir() and (path / "config.json").exists()


def inside(folder: Path, name: str) -> Path:
    """A file of the folder; links that lead out of it are refused.

    A link into the cache of `huggingface_hub` is its own kind: the files of a snapshot are links
    to `blobs` of the same model.
    """
    path = folder / name
    real, base = path.resolve(), folder.resolve()
    own = base.parent.parent / "blobs" if base.parent.name == "snapshots" else base
    if not (real.is_relative_to(base) or real.is_relative_to(own)):
        raise ImportModelError(f"{path} leads out of its folder", found=str(real))
    if real.exists() and not real.is_file():  # opening a pipe would block
        raise ImportModelError(f"cannot read {path}: it is not a regular file")
    return path


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """An object from a JSON file of the folder."""
    path = inside(folder, name)
    try:
        if path.stat().st_size > MAX_JSON:
            raise ImportModelError(f"{path} is too large", expected=f"at most {MAX_JSON} bytes")
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ImportModelError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ImportModelError(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ImportModelError(f"{path} does not hold an object", found=type(data).__name__)
    return data


def read_folder(path: str | Path) -> HuggingFaceFolder:
    path = Path(path)
    data = read_json(path, "config.json")
    if data.get("quantization_config") is not None:
        raise UnsupportedError(
            f"{path} holds weights that another tool has quantized",
            hint="Load the float model, or a GGUF file of it.",
        )
    architecture, config = config_from_json(data, str(path / "config.json"))
    if (path / "generation_config.json").exists():
        config = _with_eos(config, read_json(path, "generation_config.json"))
    tensors = _named(_arrays(path), architecture, config, path)
    name = config.name or path.resolve().name
    config = replace(config, name=name, pooling=_pooling(path) or config.pooling)
    return HuggingFaceFolder(path, architecture, config, tensors)


def _pooling(path: Path) -> str:
    """How sentence-transformers makes one vector of a text's states; empty if it is not said."""
    if not (path / _POOLING_FILE).exists():
        return ""
    settings = read_json(path, _POOLING_FILE)
    return next((kind for key, kind in _POOLINGS.items() if settings.get(key) is True), "")


def _with_eos(config: ModelConfig, data: Mapping[str, Any]) -> ModelConfig:
    value = data.get("eos_token_id")
    items = value if isinstance(value, list) else [value]
    more = tuple(item for item in items if type(item) is int and item >= 0)
    return replace(config, eos=tuple(dict.fromkeys((*config.eos, *more))))


def weight_files(path: Path) -> list[str]:
    """The names of the files that hold a folder's weights, and of their index, if there is one."""
    if (path / _INDEX).exists():
        return [_INDEX, *sorted(set(_shards(read_json(path, _INDEX))))]
    return ["model.safetensors"]


def _arrays(path: Path) -> dict[str, Array]:
    names = weight_files(path)
    for name in names:
        inside(path, name)
    if _INDEX in names:
        return read_index(path / _INDEX)
    file = path / "model.safetensors"
    if not file.exists():
        raise ImportModelError(
            f"{path} holds no weights",
            expected="model.safetensors, or its index",
            hint="PyTorch's .bin files are not read: save the model with safe_serialization.",
        )
    return read_safetensors(file)


def _shards(index: Mapping[str, Any]) -> list[str]:
    files = index.get("weight_map")
    found = list(files.values()) if isinstance(files, dict) else []
    return [name for name in found if isinstance(name, str) and "\0" not in name]


def _named(
    arrays: dict[str, Array], architecture: Architecture, config: ModelConfig, path: Path
) -> dict[str, StoredTensor]:
    """Tensors by GGUF name."""
    prefix = "bert." if any(name.startswith("bert.") for name in arrays) else ""
    templates = {hf: own for own, hf in architecture.folder_names().items()}
    patterns = [(_pattern(prefix + hf), own) for hf, own in templates.items()]
    found: dict[str, StoredTensor] = {}
    experts: dict[str, dict[int, Array]] = {}
    unknown = []
    for name, array in arrays.items():
        stem, _, kind = name.rpartition(".")
        match, own = _match(patterns, stem)
        if match is None or kind not in ("weight", "bias"):
            if not _IGNORED.search(name):
                unknown.append(name)
            continue
        groups = match.groupdict()
        target = own.replace("{i}", groups.get("i", "")) + f".{kind}"
        if dtype(array.dtype).name not in _FLOATS:
            raise UnsupportedError(
                f"tensor {name!r} is not of floats", where=str(path), found=array.dtype
            )
        if "e" in groups:
            experts.setdefault(target, {})[int(groups["e"])] = array
        else:
            found[target] = _stored(target, array, architecture.unit_offset)
    if unknown:
        raise UnsupportedError(
            f"the architecture {architecture.name!r} has no tensor {min(unknown)!r}",
            where=str(path),
            hint="The model differs from its architecture; it would not be computed right.",
        )
    for target, parts in experts.items():
        found[target] = _stacked(target, parts, config, path)
    return found


def _pattern(template: str) -> re.Pattern[str]:
    text = re.escape(template)
    for key in "ie":
        text = text.replace(rf"\{{{key}\}}", rf"(?P<{key}>\d{{1,6}})")
    return re.compile(text)


def _match(
    patterns: list[tuple[re.Pattern[str], str]], stem: str
) -> tuple[re.Match[str] | None, str]:
    for pattern, own in patterns:
        if found := pattern.fullmatch(stem):
            return found, own
    return None, ""


def _stored(name: str, array: Array, unit_offset: bool) -> StoredTensor:
    if unit_offset and name.endswith("norm.weight"):
        array = array.astype(np.float32) + 1
    return StoredTensor(name, dtype(array.dtype).name.upper(), array.shape, array)


def _stacked(target: str, parts: dict[int, Array], config: ModelConfig, path: Path) -> StoredTensor:
    count = config.experts.count if config.experts else 0
    shapes = {array.shape for array in parts.values()}
    if sorted(parts) != list(range(count)) or len(shapes) != 1:
        raise ImportModelError(
            f"the experts of {target!r} are incomplete",
            where=str(path),
            expected=f"{count} of one shape",
            found=f"{len(parts)} of shapes {sorted(shapes)[:3]}",
        )
    array = np.stack([parts[number] for number in range(count)])
    return StoredTensor(target, dtype(array.dtype).name.upper(), array.shape, array)
