"""Chooses the format of every matrix: from a recipe, from patterns, or within a size budget.

A budget starts with the narrowest format everywhere and widens, one matrix after another, the one
whose measured output error falls most for each byte that it costs.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from bitwright.errors import BitwrightError
from bitwright.frontend.language.architectures import BY_NAME, Architecture
from bitwright.frontend.language.stored import ROW_FORMAT, StoredTensor
from bitwright.llm.quantize.encoders import ENCODERS

Width = int | str
FORMAT_OF_WIDTH = {4: "Q4_1", 5: "Q5_1", 8: "Q8_0"}
RECIPES: dict[str, dict[str, Width]] = {
    "w4": {"lm_head": 8, "*": 4},
    "w8": {"*": 8},
    "int8": {"*": ROW_FORMAT},
}
"""Widths by pattern. Rows of `int8` have one scale, as have rows of activations, so that products
are integer products; `w8` and `w4` have a scale per 32 weights and activations."""
_LEFT = re.compile(r"ffn_gate_inp|position_embd|token_types|norm|rope_f")
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9}


@dataclass(frozen=True)
class Choice:
    """The format of a matrix, or the reason why it stays as it is."""

    name: str
    format: str | None
    reason: str = ""


def is_matrix(tensor: StoredTensor) -> bool:
    """Whether a tensor is one that recipes quantize."""
    return len(tensor.shape) >= 2 and not _LEFT.search(tensor.name)


def choose_formats(
    tensors: Mapping[str, StoredTensor],
    architecture: str,
    recipe: str,
    widths: Mapping[str, Width] | None,
) -> dict[str, Choice]:
    """A choice for every matrix. The first pattern of `widths`, then of the recipe, decides.

    A pattern matches the tensor's name in GGUF files or in Hugging Face folders, whole or in part
    ("lm_head", "*.ffn_down.*"). A table that is tied to the head counts as "lm_head".
    """
    if recipe not in RECIPES:
        raise BitwrightError(
            f"no recipe for language models is named {recipe!r}", expected=", ".join(RECIPES)
        )
    rules = {
        **(widths or {}),
        **{k: v for k, v in RECIPES[recipe].items() if k not in (widths or {})},
    }
    ordered = sorted(rules.items(), key=lambda rule: rule[0] == "*")  # "*" comes last
    formats = [(pattern, format_of(width)) for pattern, width in ordered]
    is_tied = "output.weight" not in tensors
    found, matched = {}, set()
    for name, tensor in tensors.items():
        if not is_matrix(tensor):
            continue
        names = aliases(name, BY_NAME[architecture], is_tied)
        pattern, kind = next(
            (pattern, kind) for pattern, kind in formats if any(matches(pattern, n) for n in names)
        )
        matched.add(pattern)
        if ENCODERS[kind].has_rows and len(tensor.shape) > 2:
            kind = FORMAT_OF_WIDTH[8]  # products of experts have blocks
        reason = ENCODERS[kind].why_not(tensor.shape[-1])
        found[name] = Choice(name, None if reason else kind, reason)
    if lost := [pattern for pattern in (widths or {}) if pattern not in matched and pattern != "*"]:
        raise BitwrightError(
            f"the pattern {lost[0]!r} matches no matrix",
            hint=f"Matrices are named {', '.join(list(found)[:4])}, …",
        )
    return found


def format_of(width: Width) -> str:
    """A format by its bits or its name."""
    kind = FORMAT_OF_WIDTH.get(width) if isinstance(width, int) else str(width).upper()
    if kind not in ENCODERS:
        raise BitwrightError(
            f"no format has the width {width!r}",
            expected=f"{', '.join(map(str, FORMAT_OF_WIDTH))} or one of {', '.join(ENCODERS)}",
        )
    return kind


def aliases(name: str, architecture: Architecture, is_tied: bool) -> list[str]:
    """The names that patterns may use for a tensor."""
    stem = name.removesuffix(".weight")
    layer = re.match(r"blk\.(\d+)\.", stem)
    template = re.sub(r"^blk\.\d+\.", "blk.{i}.", stem)
    found = [name, stem]
    theirs = architecture.folder_names().get(template)
    if theirs is not None:
        found.append(theirs.replace("{i}", layer[1] if layer else ""))
    if stem == "output" or (stem == "token_embd" and is_tied):
        found += ["lm_head", "output"]
    return found


def matches(pattern: str, name: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or pattern in name.split(".")


def parse_size(size: str | int) -> int:
    """Bytes of a budget: a number, or text such as "80MB"."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kKmMgG]?[bB]?)\s*", str(size))
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise BitwrightError(f"{size!r} is no size", expected='bytes, or text such as "80MB"')
    return int(float(match[1]) * unit)


def stored_bytes(tensor: StoredTensor, kind: str) -> int:
    """Bytes of a tensor in a format."""
    return int(math.prod(tensor.shape) * ENCODERS[kind].bits / 8)


def within_budget(
    tensors: Mapping[str, StoredTensor],
    choices: Mapping[str, Choice],
    errors: Mapping[str, Mapping[str, float]],
    budget: int,
) -> dict[str, Choice]:
    """Formats with the least sum of measured errors found for the budget.

    `errors[name][format]` is the relative output error of a matrix in a format.
    """
    fixed = sum(
        tensor.nbytes
        for name, tensor in tensors.items()
        if name not in choices or choices[name].format is None
    )
    kinds = sorted(FORMAT_OF_WIDTH.values(), key=lambda kind: ENCODERS[kind].bits)
    level = {name: 0 for name, choice in choices.items() if choice.format is not None}
    size = fixed + sum(stored_bytes(tensors[name], kinds[0]) for name in level)
    if size > budget:
        raise BitwrightError(
            "the size budget is too small",
            expected=f"at least {size} bytes",
            found=budget,
        )

    def gain(name: str) -> tuple[float, int]:
        """What the next wider format saves for each byte, and its bytes."""
        now, following = kinds[level[name]], kinds[level[name] + 1]
        cost = stored_bytes(tensors[name], following) - stored_bytes(tensors[name], now)
        return (errors[name][now] - errors[name][following]) / cost, cost

    while True:
        open_ = [(gain(name), name) for name, at in level.items() if at + 1 < len(kinds)]
        fitting = [(rate, cost, name) for (rate, cost), name in open_ if size + cost <= budget]
        if not fitting:
            break
        _, cost, name = max(fitting)
        level[name] += 1
        size += cost
    return {
        name: Choice(name, kinds[level[name]] if name in level else None, choice.reason)
        for name, choice in choices.items()
    }
